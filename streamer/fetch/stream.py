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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamer.fetch.buffers import Buffer, Staging
from streamer.sources.base import ObjectInfo, Source

__all__ = ["Arrival", "Direct", "Discard", "Exchange", "Read", "Staged", "open_stream"]


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
        source: where `item` is.
        staged_bytes: size of the staging buffer it needs; 0 for none.
        tag: the consumer's own.
    """

    source: Source
    item: ObjectInfo
    start: int
    segments: Sequence[Segment]
    staged_bytes: int
    tag: int = 0


@dataclass(slots=True)
class Arrival:
    """A finished read. Call `release` once its staging buffer has been copied from.

    Attributes:
        tag: of the read.
        buffer: its staging buffer, if it needed one.
    """

    tag: int
    buffer: Buffer | None
    _give_back: Callable[[Buffer], None] = field(repr=False)

    def release(self) -> None:
        """Give the staging buffer back. Idempotent; belongs to the event loop."""
        if self.buffer is not None:
            self._give_back(self.buffer)
            self.buffer = None


class Exchange(Protocol):
    """Other processes that take part in a stream: they get some of its reads, and deliver some of theirs."""

    def publish(self, read: Read, buffer: Buffer | None, deliver: Callable[[Arrival], None]) -> bool:
        """Take over a finished read, if it is one to share; the exchange gives its buffer back."""

    async def run(self, deliver: Callable[[Arrival], None]) -> None:
        """Deliver what others read, until all has been delivered and all that was published is given back.

        Raises:
            StreamError: somebody else failed or is gone.
        """


_GAP_SCRATCH_BYTES = 64 << 10


class _Crew:
    """Tasks that end together: when all have, or one with an error.

    Attributes:
        over: the error, or None.
    """

    def __init__(self) -> None:
        self.over: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note)

    def _note(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if not self.over.done() and (error is not None or not self._tasks):
            self.over.set_result(error)

    async def disband(self) -> None:
        """Cancel whoever is left, and wait until all have ended."""
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_stream(
    reads: Iterable[Read],
    *,
    pool: Staging,
    concurrency: Callable[[], int],
    private_gaps: bool = False,
    exchange: Exchange | None = None,
) -> AsyncIterator[AsyncIterator[Arrival]]:
    """Run `reads`; see the module for what is promised.

    Args:
        reads: consumed lazily, in order.
        pool: staging memory.
        concurrency: returns how many reads may be in flight; when it rises, more are started.
        private_gaps: a source looks at gaps too, so each needs memory of its own.
        exchange: with whom to share reads.
    """
    upcoming = iter(reads)
    arrived: asyncio.Queue[Arrival | BaseException | None] = asyncio.Queue()
    gap = None if private_gaps else memoryview(bytearray(_GAP_SCRATCH_BYTES))
    crew = _Crew()

    hired = 0

    def hire() -> None:
        nonlocal hired
        while hired < concurrency():
            hired += 1
            crew.add(work())

    async def work() -> None:
        for read in upcoming:
            hire()
            buffer = await pool.acquire(read.staged_bytes) if read.staged_bytes else None
            try:
                await read.source.read_into(read.item, read.start, list(_memory(read, buffer, gap)))
            except BaseException:
                if buffer is not None:
                    pool.release(buffer)
                    buffer = None  # or the error's traceback would keep it alive
                raise
            if exchange is None or not exchange.publish(read, buffer, arrived.put_nowait):
                arrived.put_nowait(Arrival(read.tag, buffer, pool.release))

    async def supervise() -> None:
        try:
            hire()
            if exchange is not None:
                crew.add(exchange.run(arrived.put_nowait))
            outcome = await crew.over
        finally:
            await crew.disband()
        arrived.put_nowait(outcome)

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
