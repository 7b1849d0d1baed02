"""`FetchEngine`: what a load needs of the network, offered to synchronous code."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from streamer.config import LEAST_BUFFER_BYTES, StreamConfig
from streamer.fetch.buffers import BufferPool, Staging
from streamer.fetch.fill import CopyJob, Layout, copy_arrival, demand_of, lay_out
from streamer.fetch.headers import OpenedCheckpoint, read_checkpoint, read_object
from streamer.fetch.stream import Arrival, Exchange, open_stream
from streamer.plan.plan import Request, build_plan
from streamer.report import Checksums
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.checksum_book import Readings
from streamer.sources.checksummed import ChecksummedSource
from streamer.sources.pinned import confirm
from streamer.sources.verified import VerifiedSource
from streamer.spans import add_span, span
from streamer.transport.loop import LoopThread

__all__ = ["FetchEngine", "FillTimes", "Filled", "Progress", "part_of", "request_bytes_for", "slab_bytes_for"]

MIB = 1 << 20

#: Called with the bytes of the current fill that have arrived and its total.
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class FillTimes:
    """Seconds spent, summed over fills: in the planner, waiting for bytes, copying staged ones."""

    plan: float = 0.0
    fetch: float = 0.0
    copy: float = 0.0


@dataclass(frozen=True, slots=True)
class Filled:
    """What a fill came to.

    Attributes:
        needed_bytes: that were asked for.
        over_read_bytes: read and not needed: gaps, and the rest of covering rows.
    """

    needed_bytes: int
    over_read_bytes: int


def part_of(config: StreamConfig, ranks: int) -> StreamConfig:
    """Return what one of `ranks` that share on a machine may take of the memory that `config` allows them together."""
    return config.replace(buffer_bytes=max(config.buffer_bytes // ranks, LEAST_BUFFER_BYTES))


def slab_bytes_for(config: StreamConfig) -> int:
    """Largest staging buffer under `config`, a power of two, such that a full set of them fits the buffer cap.

    They do not shrink below 1 MiB for the sake of concurrency: fewer reads run at once instead.
    """
    share = max(config.buffer_bytes // config.concurrency, MIB)
    return _floor_power_of_two(min(config.request_bytes, share, config.buffer_bytes))


def request_bytes_for(config: StreamConfig) -> int:
    """Largest request under `config`; a little of its staging buffer is left for aligning segments inside it."""
    slab = slab_bytes_for(config)
    return slab - slab // 64 - 256


def _floor_power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1)


class FetchEngine:
    """Owns the event loop thread, the buffers and the source of one load; a context manager.

    Args:
        source: closed on exit.
        config: limits.
        beside: another engine, whose event loop this one uses; it must be closed later.
        is_shared: other ranks read some of what this load needs.

    Attributes:
        request_bytes: largest read.
    """

    def __init__(
        self, source: Source, config: StreamConfig, *, beside: FetchEngine | None = None, is_shared: bool = False
    ) -> None:
        self.source = source
        if config.integrity == "manifest":
            self.source = VerifiedSource(source)
        elif config.integrity == "checksums":
            self.source = ChecksummedSource(source, longest_read_bytes=request_bytes_for(config), is_shared=is_shared)
        self.config = config
        self.times = FillTimes()
        self.request_bytes = request_bytes_for(config)
        self._buffers = BufferPool(config.buffer_bytes)
        self._pool: Staging = self._buffers
        self._is_guest = beside is not None
        self._loop = LoopThread(use_uvloop=config.use_uvloop) if beside is None else beside.loop

    def __enter__(self) -> FetchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the source, drop the buffers and end the thread. Idempotent; a forked child's is inert."""
        if self._is_guest:
            self._loop.run(self.source.close())
        else:
            self._loop.close(before=self.source.close)
        self._buffers.clear()
        self._pool = self._buffers

    def stage_in(self, pool: Staging, request_bytes: int) -> None:
        """Take staging buffers from `pool` from now on, and make reads that fit them."""
        self._buffers.clear()
        self._pool, self.request_bytes = pool, request_bytes

    @property
    def peak_buffer_bytes(self) -> int:
        return max(self._pool.peak_bytes, self._buffers.peak_bytes)

    @property
    def loop(self) -> LoopThread:
        return self._loop

    def open_checkpoint(self, *, only: Sequence[str] = (), progress: Progress | None = None) -> OpenedCheckpoint:
        """Read listing, index and headers; see `streamer.fetch.headers.read_checkpoint`.

        Raises:
            CheckpointError, MissingDependencyError: ``integrity=checksums``, and there is nothing to check.
        """
        opened = self._loop.run(read_checkpoint(self.source, self.config, only=only, progress=progress))
        if isinstance(self.source, ChecksummedSource):
            self._expect(self.source, opened)
            opened.stored = self.source.known()
        return opened

    @staticmethod
    def _expect(source: ChecksummedSource, opened: OpenedCheckpoint) -> None:
        tensors = opened.checkpoint.tensors.values()
        source.expect(((opened.items[info.file], info.start) for info in tensors if info.nbytes), opened.items)

    def readings(self) -> dict[str, Readings]:
        """Return what was read of files with stored checksums; nothing unless ``integrity=checksums``."""
        return self.source.readings() if isinstance(self.source, ChecksummedSource) else {}

    def settle_checksums(self, others: Mapping[int, Mapping[str, Readings]] | None = None) -> Checksums | None:
        """Compare what is left to compare, when all has been read. None unless ``integrity=checksums``.

        Args:
            others: `readings` of the other ranks that load together, by their numbers.

        Raises:
            IntegrityError: the bytes that arrived are not those that the store was given.
        """
        return self._loop.run(self.source.settle(others or {})) if isinstance(self.source, ChecksummedSource) else None

    def confirm(self, opened: OpenedCheckpoint) -> None:
        """Look whether a checkpoint that another process opened can be read here too.

        Raises:
            SourceError: see `streamer.errors`.
            CheckpointError, MissingDependencyError: see `open_checkpoint`.
        """
        self._loop.run(confirm(self.source, opened.items[0]))
        if isinstance(self.source, ChecksummedSource):
            self.source.adopt(opened.items, opened.stored)
            self._expect(self.source, opened)

    def read_object(self, key: str, *, limit_bytes: int) -> bytes:
        """Read a small object such as ``config.json`` whole.

        Raises:
            ObjectNotFoundError: there is none.
        """

        async def read() -> bytes:
            return await read_object(self.source, await self.source.stat(key), limit_bytes=limit_bytes)

        return self._loop.run(read())

    def read_range(self, item: ObjectInfo, start: int, end: int) -> bytes:
        """Read one range of one object."""
        body = bytearray(end - start)
        self._loop.run(self.source.read_into(item, start, [memoryview(body)]))
        return bytes(body)

    def fill(
        self,
        jobs: Sequence[CopyJob],
        items: Sequence[ObjectInfo],
        progress: Progress | None = None,
        times: FillTimes | None = None,
    ) -> Filled:
        """Read everything `jobs` need and put it where it belongs; when this returns, it is there.

        Args:
            jobs: destinations must not overlap; they are filled in no particular order.
            items: the checkpoint's objects, by file number.
            times: where to add up, instead of the engine's own: somebody does something else meanwhile.

        Raises:
            SourceError: some destinations may then be filled and others not, but no read is under way.
        """
        began = time.perf_counter()
        with span("plan", copies=len(jobs)) as note:
            plan = build_plan(
                [demand_of(job) for job in jobs],
                request_bytes=self.request_bytes,
                coalesce_gap_bytes=self.config.coalesce_gap_bytes,
            )
            requests = dict(enumerate(plan.requests))
            layout = lay_out(jobs, requests, lambda file: (self.source, items[file]))
            note(requests=len(requests))
        times = self.times if times is None else times
        times.plan += time.perf_counter() - began
        self.carry_out(layout, requests, progress, times=times)
        return Filled(plan.needed_bytes, plan.over_read_bytes)

    def carry_out(
        self,
        layout: Layout,
        requests: Mapping[int, Request],
        progress: Progress | None = None,
        exchange: Exchange | None = None,
        times: FillTimes | None = None,
    ) -> None:
        """Make the reads of `layout` and copy what each brings, and what `exchange` delivers.

        Args:
            requests: that `layout` was made of.
            times: see `fill`.

        Raises:
            StreamError: see `fill`.
        """
        if self._buffers.pin_for is None:
            devices = (target.tensor.device for target in layout.targets)
            self._buffers.pin_for = next((device for device in devices if device.type == "cuda"), None)
        total = sum(requests[read.tag].nbytes for read in layout.reads)
        arrived, copying = 0, 0.0
        began = time.perf_counter()

        def open_items() -> contextlib.AbstractAsyncContextManager[AsyncIterator[Arrival]]:
            return open_stream(
                layout.reads,
                pool=self._pool,
                concurrency=lambda: max(self.config.concurrency, self.source.stats.concurrency),
                private_gaps=self.config.integrity != "store",
                exchange=exchange,
            )

        ours = {read.tag for read in layout.reads}
        first_copy_ns = None
        with (
            span("fetch", bytes=total, requests=len(layout.reads)),
            contextlib.closing(self._loop.iterate(open_items)) as arrivals,
        ):
            for arrival in arrivals:
                first_copy_ns = first_copy_ns or time.time_ns()
                copying += copy_arrival(arrival, layout)
                if arrival.buffer is not None:
                    self._loop.call_soon(arrival.release)
                if progress is not None and arrival.tag in ours:
                    arrived += requests[arrival.tag].nbytes
                    progress(arrived, total)
            if copying and first_copy_ns is not None:  # copies lie between arrivals; their sum is what counts
                add_span("copy", first_copy_ns, time.time_ns(), seconds=copying)
        times = self.times if times is None else times
        times.copy += copying
        times.fetch += time.perf_counter() - began - copying
