"""How hard to press a store: requests in flight, requests and bytes per second.

The number of requests in flight follows the store: up by one for each round of answers in time, down by a
third when it says that it is asked too much, down a little when answers begin to take much longer than the
quickest ones did (additive increase, multiplicative decrease, as in RFC 5681, section 3.1). A refusal counts
once per round: the requests that were under way when it came would say the same thing again. The most that it may
come to is itself found by trying (`streamer.transport.climb`), as long as the store takes everything.

One object may be shared by several event loops of a process, each in its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from streamer.config import StreamConfig
from streamer.transport.climb import Climb

__all__ = ["Pressure"]

_THROTTLED_FACTOR = 2 / 3
_SLOW_FACTOR = 0.9
#: Latency lowers the limit to no less than this part of the maximum: a full link also makes answers slow.
_LEAST_SHARE_WHEN_SLOW = 0.25
#: Answers are slow when they take this many times as long as the quickest, and this much longer at least.
_SLOW_RATIO = 3.0
_SLOW_SECONDS = 0.1
_SMOOTHING = 0.1
#: The quickest answer is forgotten at this rate per answer, so that a store may become slower for good.
_FORGETTING = 1.002


class Pressure:
    """Admits requests.

    Args:
        config: `concurrency` is the most requests in flight to begin with, `max_concurrency` at any time;
            ``max_requests_per_second`` and ``max_bytes_per_second`` are caps, if they are set.
        clock: replaced in tests.
    """

    def __init__(self, config: StreamConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._climb = Climb(config.concurrency, config.max_concurrency)
        self._clock = clock
        self._lock = threading.Lock()
        self._limit = float(config.concurrency)
        self._in_flight = 0
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._requests = _Rate(config.max_requests_per_second)
        self._bytes = _Rate(config.max_bytes_per_second)
        self._quickest = float("inf")
        self._smoothed: float | None = None
        self._lowered_at = float("-inf")
        self.throttled = 0
        """How often the store said that it is asked too much."""

    @property
    def limit(self) -> int:
        """The most requests in flight at present."""
        return max(1, int(self._limit))

    @property
    def is_lowered(self) -> bool:
        """Whether the store takes less than we would send."""
        return self._limit < self._climb.limit

    @contextlib.asynccontextmanager
    async def admitted(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until a request for `nbytes` may be sent; it counts as in flight inside."""
        await self._enter()
        try:
            pause = self._charge(nbytes)
            if pause > 0:
                await asyncio.sleep(pause)
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._in_flight < self.limit and not self._waiting:
                self._in_flight += 1
                return
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, turn))
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                if (loop, turn) in self._waiting:
                    self._waiting.remove((loop, turn))
                    raise
            self._leave()  # it was our turn already
            raise

    def _leave(self) -> None:
        with self._lock:
            self._in_flight -= 1
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._in_flight < self.limit:
            loop, turn = self._waiting.popleft()
            self._in_flight += 1
            loop.call_soon_threadsafe(_wake, turn)

    def _charge(self, nbytes: int) -> float:
        with self._lock:
            now = self._clock()
            return max(self._requests.charge(1, now), self._bytes.charge(nbytes, now))

    def delivered(self, nbytes: int, *, is_cpu_bound: bool) -> None:
        """Take note that a request, which is still counted as in flight, brought `nbytes`.

        Args:
            is_cpu_bound: this process is the limit, so that more requests would not help.
        """
        with self._lock:
            before = self._climb.limit
            # Not all of them: between two reads of the same worker there is a moment with none.
            is_full = 4 * self._in_flight >= 3 * self.limit and not self.is_lowered and not is_cpu_bound
            self._climb.note(nbytes, self._clock(), is_full=is_full)
            if self._climb.limit != before and self._limit >= min(before, self._climb.limit):
                self._limit = float(self._climb.limit)
                self._admit_waiting()

    def answered(self, seconds: float) -> None:
        """Take note of an answer in good order whose head came after `seconds`."""
        with self._lock:
            self._quickest = min(self._quickest * _FORGETTING, seconds)
            before = seconds if self._smoothed is None else self._smoothed
            self._smoothed = before + _SMOOTHING * (seconds - before)
            slow = self._smoothed > max(_SLOW_RATIO * self._quickest, self._quickest + _SLOW_SECONDS)
            if not slow:
                self._limit = min(float(self._climb.limit), self._limit + 1 / self._limit)
                self._admit_waiting()
            else:
                self._lower(_SLOW_FACTOR, min(self._limit, self._climb.limit * _LEAST_SHARE_WHEN_SLOW))

    def refused(self) -> None:
        """Take note that the store asked for fewer requests."""
        with self._lock:
            self.throttled += 1
            self._climb.stop()
            self._lower(_THROTTLED_FACTOR, 1.0)

    def _lower(self, factor: float, least: float) -> None:
        now = self._clock()
        # A round is as long as an answer takes; before any came, as long as a slow one.
        if now - self._lowered_at >= (self._smoothed or _SLOW_SECONDS):
            self._limit = max(1.0, least, self._limit * factor)
            self._lowered_at = now


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class _Rate:
    """A cap per second, kept by spacing: who comes waits until what was admitted before has been paid for."""

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._paid_until = 0.0

    def charge(self, amount: float, now: float) -> float:
        """Return how many seconds to wait before using `amount`."""
        if self._per_second is None:
            return 0.0
        start = max(now, self._paid_until)
        self._paid_until = start + amount / self._per_second
        return start - now
