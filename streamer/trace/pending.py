"""Copies that were recorded and not yet carried out, indexed by the bytes they will write."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from streamer.plan.geometry import View, disjoint
from streamer.trace.lazy import LazyTensor

__all__ = ["Pending", "PendingCopies", "storage_key", "storage_of"]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of `tensor` without completing what is pending of it (`streamer.trace.methods`)."""
    with torch._C.DisableTorchFunction():
        return torch._C.TensorBase.untyped_storage(tensor)


#: Identifies the storage of a tensor for as long as something holds it.
storage_key: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class Pending:
    """``destination.copy_(source)``, to be done later. Holds both alive.

    Attributes:
        destination: an alias made when the copy was recorded, so that later ``param.data = ...`` or
            ``resize_`` on the tensor that the model used does not redirect it.
        window: the bytes of the destination's storage that will be written.
        end: one past the last of them.
        number: order of recording.
        serial: of the write, in the `WriteLog`.
        is_airborne: it is being carried out.
    """

    destination: torch.Tensor
    source: LazyTensor
    key: int
    window: View
    end: int
    number: int
    serial: int
    is_airborne: bool = False


_number = attrgetter("number")


@dataclass(slots=True)
class _Storage:
    """Pending copies into one storage, ordered by the first byte they write."""

    order: list[tuple[int, int]] = field(default_factory=list)  # (first byte, number)
    by_number: dict[int, Pending] = field(default_factory=dict)
    longest: int = 0
    reach: int = 0  # none ends later


class PendingCopies:
    """All pending copies of a load. No two of them write the same byte (`Tracer` sees to it)."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._count = 0

    def __len__(self) -> int:
        return sum(len(storage.by_number) for storage in self._storages.values())

    def __contains__(self, key: int) -> bool:
        return key in self._storages

    def __bool__(self) -> bool:
        return bool(self._storages)

    def add(self, destination: torch.Tensor, source: LazyTensor, key: int, window: View, end: int, serial: int) -> None:
        """Record a copy into `window`, which ends at `end`; the caller has dealt with what it overlaps."""
        number = self._count
        self._count += 1
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _Storage()
        offset = window.offset
        if offset >= storage.reach:
            storage.order.append((offset, number))
        else:
            insort(storage.order, (offset, number))
        storage.by_number[number] = Pending(destination, source, key, window, end, number, serial)
        if end > storage.reach:
            storage.reach = end
        if end - offset > storage.longest:
            storage.longest = end - offset

    def overlapping(self, window: View, end: int, key: int) -> list[Pending]:
        """Return the copies that write bytes of `window`, which ends at `end`, in storage `key`, as recorded."""
        storage = self._storages.get(key)
        offset = window.offset
        if storage is None or offset >= storage.reach or offset == end:
            return []
        order = storage.order
        position = bisect_left(order, (offset - storage.longest + 1, -1))  # those before end before it
        found = []
        while position < len(order) and order[position][0] < end:
            pending = storage.by_number[order[position][1]]
            if pending.end > offset and not disjoint(pending.window, window):
                found.append(pending)
            position += 1
        if len(found) > 1:
            found.sort(key=_number)
        return found

    def all(self) -> list[Pending]:
        """Return every copy, in the order recorded."""
        every = [pending for storage in self._storages.values() for pending in storage.by_number.values()]
        every.sort(key=_number)
        return every

    def take_all(self) -> list[Pending]:
        """Remove and return every copy, in the order recorded."""
        every = self.all()
        self._storages.clear()
        return every

    def remove(self, done: Pending) -> None:
        storage = self._storages[done.key]
        del storage.by_number[done.number]
        del storage.order[bisect_left(storage.order, (done.window.offset, done.number))]
        if not storage.by_number:
            del self._storages[done.key]
