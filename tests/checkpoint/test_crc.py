"""CRCs of ranges, put together, are those of the whole; what lies on no path through a region is told apart."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import awscrt.checksums
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.checkpoint.crc import CRCS
from streamer.checkpoint.regions import Intervals, join

DIRECT: dict[str, Callable[[bytes], int]] = {
    "CRC32": zlib.crc32,
    "CRC32C": awscrt.checksums.crc32c,
    "CRC64NVME": awscrt.checksums.crc64nvme,
}
#: Of b"123456789": https://reveng.sourceforge.io/crc-catalogue/all.htm
CHECK_VALUES = {"CRC32": 0xCBF43926, "CRC32C": 0xE3069283, "CRC64NVME": 0xAE8B14860A799888}


def test_every_algorithm_is_tested() -> None:
    assert CRCS.keys() == DIRECT.keys() == CHECK_VALUES.keys()


@pytest.mark.parametrize("name", CRCS)
def test_the_catalogue_agrees(name: str) -> None:
    assert DIRECT[name](b"123456789") == CHECK_VALUES[name]
    assert CRCS[name].combine(DIRECT[name](b"1234"), DIRECT[name](b"56789"), 5) == CHECK_VALUES[name]


@pytest.mark.parametrize("name", CRCS)
@given(st.lists(st.binary(max_size=300), max_size=6))
def test_ranges_come_to_the_whole(name: str, ranges: list[bytes]) -> None:
    found = 0
    for each in ranges:
        found = CRCS[name].combine(found, DIRECT[name](each), len(each))
    assert found == DIRECT[name](b"".join(ranges))


@pytest.mark.parametrize("name", CRCS)
def test_long_ranges_too(name: str) -> None:
    """Zeros stand for 40 MiB; as a number of bytes, that has few bits set, and one less has many."""
    for nbytes in (40 << 20, (40 << 20) - 1):
        body = bytes(nbytes)
        assert CRCS[name].combine(DIRECT[name](b"abc"), DIRECT[name](body), nbytes) == DIRECT[name](b"abc" + body)


RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).filter(lambda pair: pair[0] < pair[1]), max_size=12)


@given(RANGES)
def test_intervals_are_a_set_of_bytes(ranges: list[tuple[int, int]]) -> None:
    found, known = Intervals(), set[int]()
    for start, end in ranges:
        found.add(start, end)
        known.update(range(start, end))
        assert found.nbytes == len(known)
    missing = [position for start, end in found.missing(0, 20) for position in range(start, end)]
    assert missing == [position for position in range(20) if position not in known]


def test_two_readings_that_differ_are_told() -> None:
    body = bytes(range(20))
    pieces = {each: zlib.crc32(body[slice(*each)]) for each in [(0, 10), (10, 15), (10, 20), (15, 20)]}
    assert join(pieces, 0, 20, CRCS["CRC32"]).crc == zlib.crc32(body)
    for wrong, found in [((10, 15), (15, 20)), ((10, 20), (15, 20)), ((15, 20), (15, 20))]:
        joined = join({**pieces, wrong: 0}, 0, 20, CRCS["CRC32"])
        assert (joined.crc, joined.contradiction) == (None, found)
    assert join({**pieces, (0, 10): 0}, 0, 20, CRCS["CRC32"]).crc != zlib.crc32(body)


def paths(ranges: set[tuple[int, int]], position: int, end: int) -> list[list[tuple[int, int]]]:
    if position == end:
        return [[]]
    following = [each for each in ranges if each[0] == position]
    return [[each, *path] for each in following for path in paths(ranges, each[1], end)]


@settings(max_examples=300, deadline=None)
@given(RANGES, st.binary(min_size=20, max_size=20), st.data())
def test_paths_through_a_region(ranges: list[tuple[int, int]], body: bytes, data: st.DataObject) -> None:
    pieces = {(start, end): zlib.crc32(body[start:end]) for start, end in ranges}
    every = paths(set(pieces), 0, 20)
    on_paths = {each for path in every for each in path}
    joined = join(pieces, 0, 20, CRCS["CRC32"])
    assert joined.crc == (zlib.crc32(body) if every else None)
    assert joined.contradiction is None
    assert joined.apart == sum(end - start for start, end in pieces if (start, end) not in on_paths)
    if not on_paths:
        return
    wrong = data.draw(st.sampled_from(sorted(on_paths)))
    joined = join({**pieces, wrong: pieces[wrong] ^ 1}, 0, 20, CRCS["CRC32"])
    if all(wrong in path for path in every):
        assert joined.crc != zlib.crc32(body)
    else:
        assert joined.contradiction is not None
