"""Which ranges a folder of some ranks holds, and for whom they are enough."""

from __future__ import annotations

import random

import pytest

from streamer.checkpoint.partial import Layout, Partial, PartialFile, close_gaps
from streamer.checkpoint.regions import Intervals

NAME = "0" * 32 + "-" + "1" * 16 + ".part"


def test_intervals_say_what_is_missing_of_any_range() -> None:
    rng = random.Random(3)
    for _ in range(300):
        there: set[int] = set()
        intervals = Intervals()
        for _ in range(rng.randrange(6)):
            start = rng.randrange(40)
            end = start + rng.randrange(1, 8)
            intervals.add(start, end)
            there |= set(range(start, end))
        low = rng.randrange(40)
        high = low + rng.randrange(20)
        missing = intervals.missing(low, high)
        assert [at for start, end in missing for at in range(start, end)] == sorted(set(range(low, high)) - there)
        assert all(start < end for start, end in missing)


def test_files_hold_what_lies_in_one_range() -> None:
    file = PartialFile(NAME, 30, ((0, 10), (15, 20), (29, 30)))
    there = {*range(10), *range(15, 20), 29}
    for start in range(30):
        for end in range(start, 31):
            assert file.holds(start, end) is (set(range(start, end)) <= there), (start, end)
    assert not PartialFile(NAME, 30, ()).holds(0, 1)
    assert not PartialFile(NAME, 30, ((5, 10),)).holds(0, 1)
    assert file.nbytes == 16


def test_gaps_are_closed_but_for_that_after_the_header() -> None:
    assert close_gaps([(12, 20), (25, 30), (36, 40)], 10, 5) == [(0, 10), (12, 30), (36, 40)]
    assert close_gaps([(25, 30), (12, 40), (0, 11), (44, 50)], 10, 4) == [(0, 50)]
    assert close_gaps([(20, 30), (12, 50), (55, 60)], 10, 5) == [(0, 10), (12, 60)]
    assert close_gaps([], 10, 5) == [(0, 10)]


def test_a_layout_covers_fewer_ranks_and_smaller_reads() -> None:
    held = Layout("e", 4, 1, False, (1, 2), 100, True)
    assert held.covers(Layout("e", 4, 1, False, (2,), 100, False))
    for other in (
        Layout("e", 4, 1, False, (0, 1), 100),
        Layout("e", 4, 1, False, (1,), 101),
        Layout("f", 4, 1, False, (1,), 100),
        Layout("e", 8, 1, False, (1,), 100),
        Layout("e", 4, 2, False, (1,), 100),
        Layout("e", 4, 1, True, (1,), 100),
    ):
        assert not held.covers(other), other
    assert not Layout("e", 4, 1, False, (1,), 100).covers(Layout("e", 4, 1, False, (1,), 100, True))


def test_layouts_join_when_only_ranks_differ() -> None:
    first, other = Layout("e", 4, 1, False, (2,), 100), Layout("e", 2, 1, False, (0,), 100)
    joined = Layout("e", 4, 1, False, (0, 2), 100).join((first, other))
    assert joined == (other, Layout("e", 4, 1, False, (0, 2), 100))


def test_documents_come_back_as_they_went() -> None:
    partial = Partial((Layout("e", 4, 2, True, (1, 2), 100, True),), {"k": PartialFile(NAME, 30, ((0, 10), (15, 30)))})
    assert Partial.from_document(partial.to_document()) == partial
    assert str(partial) == "ranks 1, 2 of engine e with tp=4, pp=2, ep"


@pytest.mark.parametrize(
    "entry",
    [
        ["../x", 5, []],
        [NAME + "/x", 5, []],
        [NAME, 5, [[0, 6]]],
        [NAME, 5, [[3, 3]]],
        [NAME, 9, [[0, 3], [3, 5]]],
        [NAME, 9, [[4, 5], [0, 3]]],
        [NAME, 5, [[-1, 3]]],
        [NAME, "5", []],
        [NAME, 5, [[0, 1.5]]],
        [NAME, 5],
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(entry: list[object]) -> None:
    document = {"layouts": [["e", 1, 1, False, [0], 0, False]], "files": {"k": entry}}
    with pytest.raises((TypeError, ValueError)):
        Partial.from_document(document)
