"""Which bytes of a model got values, so that parameters that got none can be named."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from streamer.plan.geometry import View, disjoint
from streamer.trace.layout import view_of
from streamer.trace.pending import storage_key, storage_of

__all__ = ["WriteLog"]


class WriteLog:
    """Which bytes of which storage something was written to or will be, and in what order."""

    def __init__(self) -> None:
        self._writes: dict[int, list[tuple[View, int]]] = {}
        # While a weak reference exists, no other storage gets the key of one that was freed.
        self._seen: dict[int, StorageWeakRef] = {}
        self._count = 0

    def note(self, tensor: torch.Tensor) -> int:
        """Remember that `tensor`'s bytes get values; return a number that grows with every call."""
        return self.note_window(tensor, storage_key(tensor), view_of(tensor))

    def note_window(self, tensor: torch.Tensor, key: int, window: View) -> int:
        """`note`, for who knows the tensor's storage and window already."""
        writes = self._writes.get(key)
        if writes is None:
            writes = self._writes[key] = []
            self._seen[key] = StorageWeakRef(storage_of(tensor))  # type: ignore[no-untyped-call]
        if writes and writes[-1][0] == window:
            writes.pop()
        self._count += 1
        writes.append((window, self._count))
        return self._count

    def since(self, key: int, window: View, serial: int) -> bool:
        """Whether bytes of `window` in storage `key` were written to after the write numbered `serial`."""
        return any(number > serial and not disjoint(other, window) for other, number in self._writes.get(key, ()))

    def reached(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written to bytes of `tensor`; an empty tensor needs nothing."""
        window = view_of(tensor)
        if window.offset == window.end:
            return True
        writes = self._writes.get(storage_key(tensor), ())
        return any(other.offset < window.end and window.offset < other.end for other, _ in writes)
