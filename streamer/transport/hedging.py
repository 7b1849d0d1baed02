"""Asks a second time for a read that takes far longer than its like; the first to come counts.

A few requests in a thousand are slow for reasons of their own (a busy disk, a lost packet, a bad path), and a
load waits for the slowest. The duplicate goes into memory of its own: two answers are never mixed, and what
loses is cancelled and waited for before anybody looks at the result.

How long is too long follows the smoothed duration and its deviation (RFC 6298, section 2).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from streamer.config import StreamConfig
from streamer.errors import SourceError
from streamer.transport.pressure import Pressure
from streamer.transport.stats import TransferStats

__all__ = ["Hedging"]

#: Fills buffers with the bytes from a position on.
ReadRange = Callable[[int, Sequence[memoryview]], Awaitable[None]]

_MOST_AT_ONCE = 2
_LEAST_SAMPLES = 8


class Hedging:
    """Decides when to hedge, for the reads of one source and event loop.

    Args:
        config: `hedge` and `hedge_after_seconds`.
        stats: counts the duplicates.
        pressure: a store that is asked too much is not asked twice.
    """

    def __init__(self, config: StreamConfig, stats: TransferStats, pressure: Pressure) -> None:
        self._least_seconds = config.hedge_after_seconds if config.hedge else None
        self._stats = stats
        self._pressure = pressure
        self._under_way = 0
        self._samples = 0
        self._smoothed = 0.0
        self._deviation = 0.0

    def patience(self) -> float | None:
        """Return after how many seconds a read is hedged; None when it is not."""
        if self._least_seconds is None or self._samples < _LEAST_SAMPLES or self._pressure.is_lowered:
            return None
        return max(self._least_seconds, self._smoothed + 4 * self._deviation)

    def _note(self, seconds: float) -> None:
        if not self._samples:
            self._smoothed, self._deviation = seconds, seconds / 2
        else:
            self._deviation += (abs(seconds - self._smoothed) - self._deviation) / 4
            self._smoothed += (seconds - self._smoothed) / 8
        self._samples += 1

    async def read(self, read: ReadRange, start: int, buffers: Sequence[memoryview]) -> None:
        """Run ``read(start, buffers)``, and perhaps a duplicate. When this ends, neither writes to `buffers`.

        Raises:
            SourceError: what `read` raises, when no duplicate came to better.
        """
        patience = self.patience()
        began = time.monotonic()
        if patience is None:
            await read(start, buffers)
        else:
            await self._read_hedged(read, start, buffers, patience)
        self._note(time.monotonic() - began)

    async def _read_hedged(self, read: ReadRange, start: int, buffers: Sequence[memoryview], patience: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        duplicate: asyncio.Task[bytearray] | None = None

        def launch() -> None:
            nonlocal duplicate
            if self._under_way < _MOST_AT_ONCE:
                self._under_way += 1
                self._stats.hedges += 1
                duplicate = asyncio.ensure_future(_read_apart(read, start, sum(map(len, buffers))))
                duplicate.add_done_callback(stop_original)

        def stop_original(done: asyncio.Task[bytearray]) -> None:
            self._under_way -= 1
            if not done.cancelled() and done.exception() is None and not ended:
                task.cancel()

        ended = False
        timer = asyncio.get_running_loop().call_later(patience, launch)
        try:
            await read(start, buffers)
        except asyncio.CancelledError:
            ended = True
            won = duplicate is not None and duplicate.done() and not duplicate.cancelled()
            # As asyncio.timeout does: only if nobody but us asked for the cancellation.
            if not won or task.uncancel() > cancelled_before:
                raise
            assert duplicate is not None
            _copy(duplicate.result(), buffers)
        except SourceError:
            ended = True
            if duplicate is None:
                raise
            (outcome,) = await asyncio.gather(duplicate, return_exceptions=True)
            if isinstance(outcome, BaseException):
                raise
            _copy(outcome, buffers)
        finally:
            ended = True
            timer.cancel()
            if duplicate is not None:
                duplicate.cancel()
                await asyncio.gather(duplicate, return_exceptions=True)


async def _read_apart(read: ReadRange, start: int, nbytes: int) -> bytearray:
    body = bytearray(nbytes)
    await read(start, [memoryview(body)])
    return body


def _copy(body: bytearray, buffers: Sequence[memoryview]) -> None:
    rest = memoryview(body)
    for buffer in buffers:
        buffer[:] = rest[: len(buffer)]
        rest = rest[len(buffer) :]
