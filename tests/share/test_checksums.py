"""Ranks that share read a part of every file each; together they check all of it, and hear of damage to any of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from streamer.artifacts.digests import make_manifest
from streamer.checkpoint.manifest import MANIFEST_KEY
from streamer.checkpoint.stored import StoredChecksum, StoredPart
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, IntegrityError, LoadError, MissingDependencyError
from streamer.report import Checksums
from streamer.session import LoadSession
from streamer.sources import checksum_book
from streamer.sources.base import ObjectInfo
from streamer.sources.hashes import find_algorithm
from streamer.sources.memory import MemorySource
from tests.servers.checksums import DIGESTS
from tests.share.test_sharing import STATE, expected, fetched, objects_of, part
from tests.share.together import CountingSource, LoadSessionFactory, Parameters, Rank, on_ranks

pytestmark = pytest.mark.usefixtures("nothing_is_left")

NAMES = list(STATE)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
OBJECTS = objects_of(*({name: STATE[name] for name in names} for names in (NAMES[:3], NAMES[3:])))
TOTAL = sum(map(len, OBJECTS.values()))
CHECKED: dict[str, Any] = {"integrity": "checksums", "header_read_bytes": 4096, "request_bytes": 64 << 10}


class KeepingSource(CountingSource):
    """Keeps checksums, as S3 does, and may be told to damage what this rank reads of weights.

    Args:
        algorithms: of each file.
        part_bytes: it was uploaded in such parts.
        damages: how many of its reads to change, in their first byte; None for all.
        where: which reads may be.
    """

    def __init__(
        self,
        algorithms: Sequence[str] = ("CRC32", "CRC32"),
        *,
        objects: Mapping[str, bytes] = OBJECTS,
        part_bytes: int | None = None,
        damages: int | None = 0,
        where: Callable[[int, int], bool] = lambda start, end: start > 0,
    ) -> None:
        super().__init__(objects)
        self._algorithms = dict(zip(OBJECTS, algorithms, strict=True))
        self._part_bytes = part_bytes
        self._damages = damages
        self._where = where
        self.damaged: list[str] = []
        self.asked: list[str] = []

    async def stored_checksum(self, item: ObjectInfo) -> StoredChecksum:
        self.asked.append(item.key)
        body, digest = self._objects[item.key], DIGESTS[self._algorithms[item.key]]
        step = self._part_bytes or len(body)
        bounds = [(start, min(start + step, len(body))) for start in range(0, len(body), step)]
        parts = tuple(StoredPart(start, end, digest(body[start:end])) for start, end in bounds)
        of_parts = digest(b"".join(each.digest for each in parts)) if self._part_bytes else None
        return StoredChecksum(self._algorithms[item.key], parts, of_parts)

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        await super().read_into(item, start, buffers)
        if not item.key.endswith(".safetensors") or not self._where(start, start + sum(map(len, buffers))):
            return
        if self._damages is None or len(self.damaged) < self._damages:
            self.damaged.append(item.key)
            buffer = next(buffer for buffer in buffers if len(buffer))
            buffer[0] ^= 0x40


def load_named(names: Sequence[str] = NAMES) -> Callable[[Rank, LoadSessionFactory], None]:
    """Load some of `STATE`."""

    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        number, size = rank.group.rank, rank.group.size
        threading.current_thread().name = f"rank {number}"
        shapes = {name: value.shape for name, value in expected(STATE, number, size).items() if name in names}

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                if name in names:
                    getattr(rank.model, name).copy_(part(name, tensor, number, size))

        rank.model = Parameters(shapes, torch.float32, load_weights)
        with new_session(rank.model) as session:
            opened = session.open(rank.source)
            session.run(load_weights, session.weights(opened))
            rank.report = session.report()

    return load


def outcome(ranks: Sequence[Rank], names: Sequence[str] = NAMES) -> Checksums:
    """Assert that all have the right parameters and the same checksums, and return these."""
    found = []
    for rank in ranks:
        if rank.error is not None:
            raise rank.error
        for name in names:
            assert torch.equal(getattr(rank.model, name), expected(STATE, rank.group.rank, rank.group.size)[name])
        assert rank.report is not None
        found.append(rank.report.checksums)
    assert found[0] is not None
    assert found.count(found[0]) == len(found)
    return found[0]


def why(found: Checksums, key: str) -> str:
    return found.files[f"memory://objects/{key}"].why


@pytest.mark.parametrize("part_bytes", [None, 50_000])
@pytest.mark.parametrize("algorithm", ["CRC32", "CRC64NVME"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_file_is_checked_though_each_rank_reads_a_part(size: int, algorithm: str, part_bytes: int | None) -> None:
    def source(rank: int) -> KeepingSource:
        return KeepingSource((algorithm, algorithm), part_bytes=part_bytes)

    ranks = on_ranks(size, load_named(), source, **CHECKED)
    found = outcome(ranks)
    assert (found.checked_files, found.checked_bytes, found.unchecked_bytes) == (2, TOTAL, 0)
    for rank in ranks:
        for key, body in OBJECTS.items():
            read = sum(end - start for name, start, end in rank.source.reads if name == key and start)
            assert 0 < read < len(body), "a rank that read all of it would prove nothing"
        assert isinstance(rank.source, KeepingSource)
        assert sorted(rank.source.asked) == ([] if rank.group.rank else sorted(OBJECTS))


@pytest.mark.parametrize("part_bytes", [None, 50_000])
@pytest.mark.parametrize(("size", "culprit"), [(2, 0), (2, 1), (4, 3)])
def test_a_byte_flipped_on_its_way_to_one_rank_fails_all(size: int, culprit: int, part_bytes: int | None) -> None:
    def source(rank: int) -> KeepingSource:
        return KeepingSource(part_bytes=part_bytes, damages=int(rank == culprit))

    with pytest.raises(AssertionError):
        outcome(on_ranks(size, load_named(), source))  # nothing else shows it
    ranks = on_ranks(size, load_named(), source, **CHECKED)
    hurt = ranks[culprit].source
    assert isinstance(hurt, KeepingSource)
    for rank in ranks:
        assert isinstance(rank.error, IntegrityError), rank.error
        assert f"memory://objects/{hurt.damaged[0]} bytes" in str(rank.error)
        assert "the store keeps" in str(rank.error)
    assert sum("on rank" in str(rank.error) for rank in ranks) == size - 1


def test_alone_each_rank_says_what_it_alone_has_checked() -> None:
    options = {**CHECKED, "coalesce_gap_bytes": 0}

    def alone(rank: Rank, _: LoadSessionFactory) -> None:
        load_named()(rank, lambda model: LoadSession(model, StreamConfig(**options)))

    off = on_ranks(2, load_named(), lambda _: KeepingSource(), **options, share="off")
    without = on_ranks(2, alone, lambda _: KeepingSource())
    for rank, other in zip(off, without, strict=True):
        assert rank.error is None
        assert rank.report is not None
        assert other.report is not None
        assert rank.report.checksums == other.report.checksums
        assert rank.report.checksums is not None
        assert why(rank.report.checksums, FIRST) == "not every byte of it was read"
        assert rank.group.gathered == 0
        assert isinstance(rank.source, KeepingSource)
        assert sorted(rank.source.asked) == sorted(OBJECTS)


def test_the_first_rank_reads_what_nobody_needs_to_have_the_file_checked() -> None:
    names = [name for name in NAMES if name != "norm"]
    ranks = on_ranks(2, load_named(names), lambda _: KeepingSource(), **CHECKED, coalesce_gap_bytes=0)
    assert outcome(ranks, names).checked_files == 2
    key, start, end = ranks[0].source.reads[-1]
    assert (key, end - start) == (FIRST, STATE["norm"].nbytes)
    for rank in ranks:
        assert rank.report is not None
        assert rank.report.sharing is not None
        assert rank.report.sharing.node_fetched_bytes == fetched(ranks)


@pytest.mark.parametrize("hosts", ["aabb", "abcd"])
def test_ranks_of_several_machines_check_together(hosts: str) -> None:
    ranks = on_ranks(4, load_named(), lambda _: KeepingSource(), **CHECKED, hosts=hosts, coalesce_gap_bytes=0)
    found = outcome(ranks)
    assert (found.checked_files, found.unchecked_bytes) == (2, 0)


def test_two_machines_that_are_sent_other_bytes_fail() -> None:
    """The range is read by a rank of each; only one reading was right, and a whole file needs both."""

    def source(rank: int) -> KeepingSource:
        return KeepingSource(damages=int(rank == 1), where=lambda start, end: end - start == STATE["kv"].nbytes // 2)

    ranks = on_ranks(4, load_named(["kv"]), source, **CHECKED, hosts="abcd", coalesce_gap_bytes=0)
    for rank in ranks:
        assert isinstance(rank.error, IntegrityError), rank.error
        assert f"memory://objects/{SECOND} bytes" in str(rank.error)
        assert "read more than once, and not with the same bytes" in str(rank.error)


# -- what cannot be checked ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*will not be checked")
def test_hashes_cannot_be_put_together() -> None:
    found = outcome(on_ranks(2, load_named(), lambda _: KeepingSource(("CRC32", "SHA256")), **CHECKED))
    assert found.checked_files == 1
    assert why(found, SECOND).startswith("its stored checksum is SHA256, which cannot be put together from ranges")
    assert found.unchecked_bytes == len(OBJECTS[SECOND])  # what both have read, counted once
    for rank in on_ranks(2, load_named(), lambda _: KeepingSource(("SHA1", "SHA1"), part_bytes=10_000), **CHECKED):
        assert isinstance(rank.error, CheckpointError)
        assert "cannot be put together" in str(rank.error)


@pytest.mark.filterwarnings("ignore:.*will not be checked")
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_cannot_compute_a_checksum_is_named(culprit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = set()

    def find_or_miss(name: str) -> Any:
        # The first rank opens its books in its event loop, the others do so in their own threads.
        rank = 1 if threading.current_thread().name == "rank 1" else 0
        opened.add((rank, name))
        if (rank, name) == (culprit, "CRC32C"):
            raise MissingDependencyError("there is no such package")
        return find_algorithm(name)

    monkeypatch.setattr(checksum_book, "find_algorithm", find_or_miss)
    ranks = on_ranks(2, load_named(), lambda _: KeepingSource(("CRC32C", "CRC32")), **CHECKED)
    found = outcome(ranks)
    assert len(opened) == 4
    assert (found.checked_files, found.unchecked_bytes) == (1, len(OBJECTS[FIRST]))
    where = "on rank 1, " if culprit else ""
    assert why(found, FIRST) == f"{where}its stored checksum cannot be computed here: there is no such package"


def test_ranks_that_do_not_agree_on_the_integrity_are_told() -> None:
    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        options = {} if rank.group.rank else CHECKED
        config = StreamConfig(share_timeout_seconds=20.0, **options)
        load_named()(rank, lambda model: LoadSession(model, config, group=rank.group))

    for rank in on_ranks(2, load, lambda _: KeepingSource()):
        assert isinstance(rank.error, LoadError)
        assert "integrity=checksums, open memory://objects with integrity=store" in str(rank.error)


# -- integrity=manifest ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_manifest() -> Mapping[str, bytes]:
    manifest = asyncio.run(make_manifest(MemorySource(OBJECTS), StreamConfig(), block_bytes=4096))
    return {**OBJECTS, MANIFEST_KEY: manifest.to_json()}


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_manifest_is_kept_by_every_rank(culprit: int, with_manifest: Mapping[str, bytes]) -> None:
    def source(damages: int | None) -> Callable[[int], KeepingSource]:
        return lambda rank: KeepingSource(objects=with_manifest, damages=damages if rank == culprit else 0)

    ranks = on_ranks(2, load_named(), source(None), integrity="manifest", header_read_bytes=4096)
    for rank in ranks:
        assert isinstance(rank.error, IntegrityError), rank.error
        assert "are not those that the manifest was made of" in str(rank.error)
        assert ("on rank" in str(rank.error)) == (rank.group.rank != culprit)
    once = on_ranks(2, load_named(), source(1), integrity="manifest", header_read_bytes=4096)
    for rank in once:
        if rank.error is not None:
            raise rank.error
        assert rank.report is not None
        assert rank.report.retries == int(rank.group.rank == culprit)
