"""How many requests in flight serve best, found by trying.

A store gives each connection a rate of its own, so twice the connections bring twice as much until something else is
the limit: the link, the store, a processor. Which of them it is need not be known. The number is doubled; if that
brought a good deal more, it is doubled again, and else it goes back to what it was and stays there.
"""

from __future__ import annotations

__all__ = ["Climb"]

_FACTOR = 2
_LEAST_GAIN = 1.15
_LEAST_SECONDS = 0.25
#: Requests that were under way for less than this share of the time do not tell what more of them would bring.
_FULL_SHARE = 0.9


class Climb:
    """The most requests in flight, as it is known so far. Time is measured in windows of two rounds of requests; the
    first after a change is not counted, for requests that began before it end in it.

    Args:
        start: to begin with.
        most: never more.

    Attributes:
        limit: at present.
    """

    def __init__(self, start: int, most: int) -> None:
        self.limit = start
        self._most = most
        self._is_over = start >= most
        self._rate: float | None = None  # with the limit that was before
        self._before = start
        self._is_settling = True
        self._began: float | None = None
        self._nbytes = self._ended = self._full = 0

    def __repr__(self) -> str:
        return f"<Climb {self.limit}{'' if self._is_over else ', going on'}>"

    def stop(self) -> None:
        """Try no more: the store takes less than it is offered."""
        self._is_over = True

    def note(self, nbytes: int, now: float, *, is_full: bool) -> None:
        """Take note that a request ended.

        Args:
            nbytes: that it brought.
            now: seconds.
            is_full: as many were under way as may be, and more of them might help.
        """
        if self._is_over:
            return
        if self._began is None:
            self._began = now
            return
        self._nbytes += nbytes
        self._ended += 1
        self._full += is_full
        passed = now - self._began
        if self._ended < 2 * self.limit or passed < _LEAST_SECONDS:
            return
        rate, was_full = self._nbytes / passed, self._full >= _FULL_SHARE * self._ended
        self._began = now
        self._nbytes = self._ended = self._full = 0
        if self._is_settling or not was_full:
            self._is_settling = False
        else:
            self._decide(rate)

    def _decide(self, rate: float) -> None:
        if self._rate is not None and rate < _LEAST_GAIN * self._rate:
            self.limit = self._before
            self.stop()
        elif self.limit < self._most:
            self._rate, self._before, self._is_settling = rate, self.limit, True
            self.limit = min(self._most, self.limit * _FACTOR)
        else:
            self.stop()
