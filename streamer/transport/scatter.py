"""A list of memory segments that one response body fills in order."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Scatter"]


class Scatter:
    """Write cursor over `segments`.

    `view` is the memory that the next bytes go to and is never empty until everything is filled.

    Args:
        segments: writable byte views; together as long as the body. They are the caller's and must stay
            alive until the read that was given them has returned or raised.
    """

    __slots__ = ("_next", "_segments", "filled", "length", "view")

    def __init__(self, segments: Sequence[memoryview]) -> None:
        self._segments = [segment for segment in segments if len(segment)]
        self.length = sum(len(segment) for segment in self._segments)
        self.filled = 0
        self._next = 1
        self.view = self._segments[0] if self._segments else memoryview(bytearray())

    @property
    def remaining(self) -> int:
        return self.length - self.filled

    def advance(self, count: int) -> None:
        """Note that the first `count` bytes of `view` have been written."""
        self.filled += count
        self.view = self.view[count:]
        if not len(self.view) and self._next < len(self._segments):
            self.view = self._segments[self._next]
            self._next += 1

    def write(self, data: memoryview | bytes) -> None:
        """Copy `data` in; it must not be longer than `remaining`."""
        data = memoryview(data)
        while len(data):
            count = min(len(data), len(self.view))
            self.view[:count] = data[:count]
            self.advance(count)
            data = data[count:]

    def rest(self) -> list[memoryview]:
        """The segments still to be written."""
        if not self.remaining:
            return []
        return [self.view, *self._segments[self._next :]]
