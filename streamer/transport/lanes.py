"""Event loops that receive bodies: the source's own, and more in threads when that one is the limit.

Receiving, and decrypting above all, is most of a load's CPU time; both leave the interpreter lock alone, so loops in
several threads use several cores. Whether more would help is measured: a loop whose thread has been computing nearly
all the time since the last look is the limit, whatever the network could do. Where something else is, be it the
store, the link, the lock or other processes, threads are not that busy, and none is added.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from streamer.config import StreamConfig
from streamer.errors import SourceError
from streamer.transport.loop import LoopThread
from streamer.transport.pool import ConnectionPool

__all__ = ["Lanes", "most_lanes", "open_lanes"]

T = TypeVar("T")

#: Shorter reads stay in the source's loop: going elsewhere and back costs as much CPU as it relieves that of.
_LEAST_BYTES = 1 << 20
#: A thread that computed for this share of the time between two looks is the limit.
_BUSY_SHARE = 0.85
_LOOK_SECONDS = 0.2
#: One that receives over TLS at a gigabyte per second each fills most links.
_MOST = 8


def most_lanes(chosen: int | None) -> int:
    """Return how many event loops may receive: as `chosen`, or one for each processor that we may use, up to 8."""
    return chosen or max(1, min(_MOST, len(os.sched_getaffinity(0))))


def open_lanes(config: StreamConfig, ssl_context: ssl.SSLContext | None) -> Lanes:
    """Return the lanes of one source. Threads and connections come when they are needed."""
    open_pool = functools.partial(
        ConnectionPool, ssl_context=ssl_context, connect_timeout_seconds=config.connect_timeout_seconds
    )
    return Lanes(open_pool, most=most_lanes(config.receive_loops), use_uvloop=config.use_uvloop)


class _Lane:
    """A loop, None for the source's own, and the CPU time that its thread has used."""

    def __init__(self, pool: ConnectionPool, loop: LoopThread | None = None) -> None:
        self.pool = pool
        self.loop = loop
        self.in_flight = 0
        self._clock = time.pthread_getcpuclockid(threading.get_ident() if loop is None else loop.thread_id)
        self._computed = time.clock_gettime(self._clock)

    def computed(self) -> float:
        """Return the CPU seconds of its thread since the last call."""
        before, self._computed = self._computed, time.clock_gettime(self._clock)
        return self._computed - before


class Lanes:
    """Hands reads to event loops, each with connections of its own. Belongs to the loop that first uses it.

    Args:
        open_pool: makes a pool, to be used in whichever loop first awaits it.
        most: loops, the source's own included.
        use_uvloop: for the others.
        busy_share: of the time since the last look, beyond which a thread counts as the limit.

    Attributes:
        are_busy: the threads of all loops were, when they were looked at last.
    """

    def __init__(
        self,
        open_pool: Callable[[], ConnectionPool],
        *,
        most: int,
        use_uvloop: bool = False,
        busy_share: float = _BUSY_SHARE,
    ) -> None:
        self._open_pool = open_pool
        self._most = most
        self._use_uvloop = use_uvloop
        self._busy_share = busy_share
        self._lanes: list[_Lane] = []
        self._looked_at = 0.0
        self.are_busy = False

    def __repr__(self) -> str:
        return f"<Lanes {self.count} of {self._most}>"

    @property
    def count(self) -> int:
        """Loops in use."""
        return len(self._lanes)

    async def run(self, nbytes: int, work: Callable[[ConnectionPool], Awaitable[T]]) -> T:
        """Run `work`, which receives `nbytes`, in one of the loops, with connections of that loop.

        When this has returned, raised or been cancelled, `work` has ended.
        """
        lane = self._choose(nbytes)
        lane.in_flight += nbytes
        try:
            return await (work(lane.pool) if lane.loop is None else _elsewhere(lane.loop, work, lane.pool))
        finally:
            lane.in_flight -= nbytes

    def _choose(self, nbytes: int) -> _Lane:
        if not self._lanes:
            self._lanes.append(_Lane(self._open_pool()))
            self._looked_at = time.monotonic()
        if nbytes < _LEAST_BYTES:
            return self._lanes[0]
        self._look()
        return min(self._lanes, key=lambda lane: lane.in_flight)

    def _look(self) -> None:
        """Find out whether all threads are busy computing; if so, add one if there may be more."""
        now = time.monotonic()
        passed = now - self._looked_at
        if passed < _LOOK_SECONDS:
            return
        self._looked_at = now
        self.are_busy = min(lane.computed() for lane in self._lanes) >= self._busy_share * passed
        if self.are_busy and len(self._lanes) < self._most:
            self._add()

    def _add(self) -> None:
        try:
            loop = LoopThread(use_uvloop=self._use_uvloop)
        except SourceError:  # no more files may be opened: what there is must do
            self._most = len(self._lanes)
            return
        self._lanes.append(_Lane(self._open_pool(), loop))

    def close(self) -> None:
        """Close all connections and end the threads. Idempotent."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            if lane.loop is None:
                lane.pool.close()
            else:
                lane.loop.close(before=_closing(lane.pool))  # a matter of a moment, and nothing else is under way


def _closing(pool: ConnectionPool) -> Callable[[], Coroutine[Any, Any, None]]:
    async def close() -> None:
        pool.close()

    return close


async def _elsewhere(loop: LoopThread, work: Callable[[ConnectionPool], Awaitable[T]], pool: ConnectionPool) -> T:
    home = asyncio.get_running_loop()
    ended: asyncio.Future[None] = home.create_future()
    tasks: list[asyncio.Task[T]] = []

    def start() -> None:
        task = asyncio.ensure_future(_call(work, pool))
        tasks.append(task)
        task.add_done_callback(lambda _: home.call_soon_threadsafe(ended.set_result, None))

    loop.call_soon(start)
    try:
        await asyncio.wait((ended,))
    except asyncio.CancelledError:
        loop.call_soon(lambda: tasks[0].cancel())
        while not ended.done():  # it writes to memory that is the caller's
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((ended,))
        if not (task := tasks.pop()).cancelled():
            task.exception()  # seen
        raise
    return tasks.pop().result()  # popped, or a traceback would keep the task, and the task the traceback


async def _call(work: Callable[[ConnectionPool], Awaitable[T]], pool: ConnectionPool) -> T:
    return await work(pool)
