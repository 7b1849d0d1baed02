"""Which bytes of a model got values, so that parameters that got none can be named."""

from __future__ import annotations

import torch

from streamer.plan.geometry import View
from streamer.trace.lazy import view_of
from streamer.trace.pending import storage_key

__all__ = ["WriteLog"]


class WriteLog:
    """Byte intervals, by storage, that something was written to or will be, and when."""

    def __init__(self) -> None:
        self._intervals: dict[int, list[tuple[int, int, int]]] = {}
        self._count = 0

    def note(self, tensor: torch.Tensor) -> int:
        """Remember that `tensor`'s bytes get values; return a number that grows with every call."""
        window = view_of(tensor)
        intervals = self._intervals.setdefault(storage_key(tensor), [])
        if intervals and intervals[-1][:2] == (window.offset, window.end):
            intervals.pop()
        self._count += 1
        intervals.append((window.offset, window.end, self._count))
        return self._count

    def since(self, key: int, window: View, serial: int) -> bool:
        """Whether bytes of `window` in storage `key` were written to after the write numbered `serial`."""
        return any(
            number > serial and start < window.end and window.offset < end
            for start, end, number in self._intervals.get(key, ())
        )

    def reached(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written to bytes of `tensor`; an empty tensor needs nothing."""
        window = view_of(tensor)
        if window.offset == window.end:
            return True
        intervals = self._intervals.get(storage_key(tensor), ())
        return any(start < window.end and window.offset < end for start, end, _ in intervals)
