"""Which bytes of a model got values, so that parameters that got none can be named."""

from __future__ import annotations

import torch

from streamer.trace.lazy import view_of
from streamer.trace.pending import storage_key

__all__ = ["WriteLog"]


class WriteLog:
    """Byte intervals, by storage, that something was written to or will be."""

    def __init__(self) -> None:
        self._intervals: dict[int, list[tuple[int, int]]] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """Remember that `tensor`'s bytes get values."""
        window = view_of(tensor)
        intervals = self._intervals.setdefault(storage_key(tensor), [])
        if not intervals or intervals[-1] != (window.offset, window.end):
            intervals.append((window.offset, window.end))

    def reached(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written to bytes of `tensor`; an empty tensor needs nothing."""
        window = view_of(tensor)
        if window.offset == window.end:
            return True
        intervals = self._intervals.get(storage_key(tensor), ())
        return any(start < window.end and window.offset < end for start, end in intervals)
