"""The fetch engine's core: many reads at once, each result handed over with the memory it holds.

Semantics, which the tests pin down one by one:

- Reads start in the order given and arrive in the order they finish.
- A read's staging buffer is held until the consumer calls `Arrival.release`, so what is in memory never
  exceeds the pool's cap, however slow the consumer is.
- The context manager owns the tasks. Leaving it early cancels them and waits for them, after which no
  read writes anywhere.
- The first failing read ends the stream; the consumer sees that error as itself, not in a group.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from streamer.fetch.buffers import Buffer, BufferPool
from streamer.sources.base import ObjectInfo, Source

__all__ = ["Arrival", "Direct", "Discard", "Read", "Staged", "open_stream"]


@dataclass(frozen=True, slots=True)
class Direct:
    """The next bytes go to memory that is already theirs, such as a CPU parameter."""

    memory: memoryview


@dataclass(frozen=True, slots=True)
class Staged:
    """The next `nbytes` go to the staging buffer, at `offset`."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Discard:
    """The next `nbytes` are a gap that nobody needs."""

    nbytes: int


Segment = Direct | Staged | Discard


@dataclass(frozen=True, slots=True)
class Read:
    """One ranged read and where its bytes go, segment by segment.

    Attributes:
        staged_bytes: size of the staging buffer it needs; 0 for none.
        tag: the consumer's own.
    """

    item: ObjectInfo
    start: int
    segments: Sequence[Segment]
    staged_bytes: int
    tag: int = 0


@dataclass(slots=True)
class Arrival:
    """A finished read. Call `release` once its staging buffer has been copied from."""

    read: Read
    buffer: Buffer | None
    _pool: BufferPool = field(repr=False)

    def release(self) -> None:
        """Give the staging buffer back. Idempotent; belongs to the event loop."""
        if self.buffer is not None:
            self._pool.release(self.buffer)
            self.buffer = None


_GAP_SCRATCH_BYTES = 64 << 10


@contextlib.asynccontextmanager
async def open_stream(
    source: Source, reads: Iterable[Read], *, pool: BufferPool, concurrency: int, private_gaps: bool = False
) -> AsyncIterator[AsyncIterator[Arrival]]:
    """Run `reads` against `source`; see the module for what is promised.

    Args:
        reads: consumed lazily, in order.
        pool: staging memory.
        concurrency: reads in flight.
        private_gaps: the source looks at gaps too, so each needs memory of its own.
    """
    upcoming = iter(reads)
    arrived: asyncio.Queue[Arrival | BaseException | None] = asyncio.Queue()
    gap = None if private_gaps else memoryview(bytearray(_GAP_SCRATCH_BYTES))

    async def work() -> None:
        for read in upcoming:
            buffer = await pool.acquire(read.staged_bytes) if read.staged_bytes else None
            try:
                await source.read_into(read.item, read.start, list(_memory(read, buffer, gap)))
            except BaseException:
                if buffer is not None:
                    pool.release(buffer)
                    buffer = None  # or the error's traceback would keep it alive
                raise
            arrived.put_nowait(Arrival(read, buffer, pool))

    async def supervise() -> None:
        workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            failed = next((task for task in done if not task.cancelled() and task.exception()), None)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        arrived.put_nowait(failed.exception() if failed else None)

    async def drain() -> AsyncGenerator[Arrival, None]:
        while True:
            item = await arrived.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    supervisor = asyncio.ensure_future(supervise())
    draining = drain()
    try:
        yield draining
    finally:
        await draining.aclose()
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        while not arrived.empty():
            left = arrived.get_nowait()
            if isinstance(left, Arrival):
                left.release()


def _memory(read: Read, buffer: Buffer | None, gap: memoryview | None) -> Iterator[memoryview]:
    for segment in read.segments:
        if isinstance(segment, Direct):
            yield segment.memory
        elif isinstance(segment, Staged):
            assert buffer is not None
            yield buffer.memory[segment.offset : segment.offset + segment.nbytes]
        elif gap is None:
            yield memoryview(bytearray(segment.nbytes))
        else:
            # Concurrent reads may scribble over each other here: nobody looks.
            for left in range(segment.nbytes, 0, -len(gap)):
                yield gap[: min(left, len(gap))]
