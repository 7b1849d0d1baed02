"""A budget of bytes, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["ByteBudget"]


class ByteBudget:
    """Admits work while the bytes it holds stay under `limit`.

    Work larger than the limit is admitted alone, so one oversized item cannot block for ever. Belongs to
    one event loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        return f"<ByteBudget {self.used} of {self.limit} used, {len(self._waiting)} waiting>"

    def _fits(self, nbytes: int) -> bool:
        return self.used + nbytes <= self.limit or not self.used

    def _take(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    async def acquire(self, nbytes: int) -> None:
        """Wait until `nbytes` may be held; earlier waiters go first."""
        if not self._waiting and self._fits(nbytes):
            self._take(nbytes)
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, admitted)
        self._waiting.append(entry)
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.release(nbytes)  # admitted and cancelled in the same turn of the loop
            else:
                self._waiting.remove(entry)
                self._admit()
            raise

    def release(self, nbytes: int) -> None:
        """Give back what `acquire` granted."""
        self.used -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, admitted = self._waiting.popleft()
            self._take(nbytes)
            admitted.set_result(None)
