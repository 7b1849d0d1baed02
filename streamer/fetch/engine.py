"""`FetchEngine`: what a load needs of the network, offered to synchronous code."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from streamer.config import StreamConfig
from streamer.fetch.buffers import BufferPool
from streamer.fetch.fill import CopyJob, copy_arrival, demand_of, lay_out
from streamer.fetch.headers import OpenedCheckpoint, read_checkpoint, read_object
from streamer.fetch.loop import LoopThread
from streamer.fetch.stream import Arrival, open_stream
from streamer.plan.plan import Plan, build_plan
from streamer.report import Checksums
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.checksummed import ChecksummedSource
from streamer.sources.verified import VerifiedSource

__all__ = ["FetchEngine", "FillTimes", "Progress", "request_bytes_for"]

MIB = 1 << 20

#: Called with the bytes of the current fill that have arrived and its total.
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class FillTimes:
    """Seconds spent, summed over fills: in the planner, waiting for bytes, copying staged ones."""

    plan: float = 0.0
    fetch: float = 0.0
    copy: float = 0.0


def request_bytes_for(config: StreamConfig) -> int:
    """Largest request under `config`, such that a full set of staged ones fits the buffer cap.

    Staging buffers are powers of two; a little is left for aligning segments inside them. Requests do
    not shrink below 1 MiB for the sake of concurrency: fewer of them run at once instead.
    """
    share = max(config.buffer_bytes // config.concurrency, MIB)
    slab = _floor_power_of_two(min(config.request_bytes, share, config.buffer_bytes))
    return slab - slab // 64 - 256


def _floor_power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1)


class FetchEngine:
    """Owns the event loop thread, the buffers and the source of one load; a context manager.

    Args:
        source: closed on exit.
        config: limits.
    """

    def __init__(self, source: Source, config: StreamConfig) -> None:
        self.source = source
        if config.integrity == "manifest":
            self.source = VerifiedSource(source)
        elif config.integrity == "checksums":
            self.source = ChecksummedSource(source, longest_read_bytes=request_bytes_for(config))
        self.config = config
        self.times = FillTimes()
        self._pool = BufferPool(config.buffer_bytes)
        self._loop = LoopThread(use_uvloop=config.use_uvloop)

    def __enter__(self) -> FetchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the source, drop the buffers and end the thread. Idempotent; a forked child's is inert."""
        self._loop.close(before=self.source.close)
        self._pool.clear()

    @property
    def peak_buffer_bytes(self) -> int:
        return self._pool.peak_bytes

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
            tensors = opened.checkpoint.tensors.values()
            self.source.expect(((opened.items[info.file], info.start) for info in tensors if info.nbytes), opened.items)
        return opened

    def settle_checksums(self) -> Checksums | None:
        """Compare what is left to compare, when all has been read. None unless ``integrity=checksums``.

        Raises:
            IntegrityError: the bytes that arrived are not those that the store was given.
        """
        return self._loop.run(self.source.settle()) if isinstance(self.source, ChecksummedSource) else None

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

    def fill(self, jobs: Sequence[CopyJob], items: Sequence[ObjectInfo], progress: Progress | None = None) -> Plan:
        """Read everything `jobs` need and put it where it belongs; when this returns, it is there.

        Args:
            jobs: destinations must not overlap; they are filled in no particular order.
            items: the checkpoint's objects, by file number.

        Returns:
            The plan that was carried out.

        Raises:
            SourceError: some destinations may then be filled and others not, but no read is under way.
        """
        began = time.perf_counter()
        plan = build_plan(
            [demand_of(job) for job in jobs],
            request_bytes=request_bytes_for(self.config),
            coalesce_gap_bytes=self.config.coalesce_gap_bytes,
        )
        layout = lay_out(jobs, plan, items)
        if self._pool.pin_for is None:
            devices = (job.destination.device for job in jobs)
            self._pool.pin_for = next((device for device in devices if device.type == "cuda"), None)
        self.times.plan += time.perf_counter() - began
        total, arrived, copying = plan.fetch_bytes, 0, 0.0
        began = time.perf_counter()

        def open_items() -> contextlib.AbstractAsyncContextManager[AsyncIterator[Arrival]]:
            return open_stream(
                self.source,
                layout.reads,
                pool=self._pool,
                concurrency=self.config.concurrency,
                private_gaps=isinstance(self.source, VerifiedSource | ChecksummedSource),
            )

        with contextlib.closing(self._loop.iterate(open_items)) as arrivals:
            for arrival in arrivals:
                copying += copy_arrival(arrival, layout)
                if arrival.buffer is not None:
                    self._loop.call_soon(arrival.release)
                arrived += plan.requests[arrival.read.tag].nbytes
                if progress is not None:
                    progress(arrived, total)
        self.times.copy += copying
        self.times.fetch += time.perf_counter() - began - copying
        return plan
