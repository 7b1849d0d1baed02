"""The copies a model's loading code makes out of lazy tensors: recorded, kept apart, carried out.

What was recorded may be carried out while more is recorded. Such copies count as pending until they have landed, so
that whoever touches their bytes waits for them, but they can be replaced no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from streamer.fetch.fill import CopyJob
from streamer.fetch.flight import Flight
from streamer.plan.geometry import View
from streamer.trace.layout import Windows
from streamer.trace.lazy import DeferredBase, LazyTensor, describe_base
from streamer.trace.ops import is_same_values
from streamer.trace.pending import Pending, PendingCopies, storage_key, storage_of
from streamer.trace.storages import ModelStorages
from streamer.trace.values import Values, job_for, leaves_of, mark_used
from streamer.trace.watcher import Watcher
from streamer.trace.writes import WriteLog

__all__ = ["Completed", "Copies"]


@dataclass(frozen=True, slots=True)
class Completed:
    """A copy that was carried out, remembered without keeping its destination alive.

    Attributes:
        storage: of the destination.
        geometry: the destination's, on meta.
        window: the bytes of the storage that were written.
        serial: of the write, in the `WriteLog`.
    """

    storage: StorageWeakRef
    geometry: torch.Tensor
    window: View
    source: LazyTensor
    serial: int


class Copies:
    """Decides which copies wait, and completes them.

    Attributes:
        recorded: how many copies into the model there were.
        pending: recorded and not carried out; no two of them write the same byte.
        planned: in a dry run, what would have been carried out.
        completed: what was carried out, when `keep_completed` asks for it.
        casts: copies that convert, by source and destination dtype.
        superseded: tensors whose copy was overwritten before it was made, and by which.
        writes: bytes of the model that got values.
        watcher: is told of copies into the model and of all operations.
    """

    def __init__(
        self,
        storages: ModelStorages,
        values: Values,
        *,
        batch_bytes: int,
        dry_run: bool,
        keep_completed: bool = False,
    ) -> None:
        self._storages = storages
        self._values = values
        self._batch_bytes = batch_bytes
        self._dry_run = dry_run
        self._keep_completed = keep_completed
        self.pending = PendingCopies()
        self.completed: list[Completed] = []
        self.recorded = 0
        self.planned: list[Pending] = []
        self.casts: Counter[tuple[str, str]] = Counter()
        self.superseded: dict[str, str] = {}
        self.writes = WriteLog()
        self.watcher: Watcher | None = None
        self._windows = Windows()
        self._flights: list[tuple[Flight, list[Pending]]] = []

    def record(self, destination: torch.Tensor, source: LazyTensor) -> torch.Tensor:
        """Do ``destination.copy_(source)``, now or later; returns the destination, as the operation does."""
        if destination.shape != source.shape:
            source = LazyTensor(source.lazy_base, source.lazy_meta.expand(destination.shape), source.device)
        if not self._dry_run and destination.is_meta:
            return destination
        key = storage_key(destination)
        if key not in self._storages.known and key not in self._storages:
            if not destination.is_meta:
                self.complete_touching([destination])  # from when the storage was still the model's
                value = self._values.materialise([source], "aten::copy_ into a temporary")(source)
                destination.copy_(value)
            return destination
        window, end = self._windows.of(destination)
        serial = self.writes.note_window(destination, key, window)
        self.recorded += 1
        dtype = destination.dtype
        if dtype != source.dtype:
            self.casts[str(source.dtype), str(dtype)] += 1
        if self.watcher is not None:
            self.watcher.copied(destination, source, key)
        if end == window.offset:
            mark_used(source.lazy_base)
            return destination
        if isinstance(source.lazy_base, DeferredBase):
            source = _peel(source, dtype)
        overlapped = self.pending.overlapping(window, end, key)
        if overlapped:
            self._settle(overlapped, window, dtype, source)
        self.pending.add(destination.detach(), source, key, window, end, serial)
        return destination

    def fill(self, destination: torch.Tensor, value: float) -> None:
        """Write one number all over `destination`, a part of the model, now."""
        self.complete_touching([destination])
        self.writes.note(destination)
        destination.fill_(value)

    def _settle(self, overlapped: list[Pending], window: View, dtype: torch.dtype, source: LazyTensor) -> None:
        """Drop the copies that one from `source` into `window` replaces, and complete the other ones that it meets."""
        blocking = []
        for earlier in overlapped:
            if earlier.window == window and earlier.destination.dtype == dtype and not earlier.is_airborne:
                self.pending.remove(earlier)
                self.superseded[describe_base(earlier.source.lazy_base)] = describe_base(source.lazy_base)
            else:
                blocking.append(earlier)
        self.complete(blocking)

    def complete_touching(self, tensors: Iterable[torch.Tensor]) -> None:
        """Complete the pending copies that write bytes which any of `tensors` holds."""
        hit: dict[int, Pending] = {}
        for tensor in tensors:
            key = storage_key(tensor)
            if key in self.pending:
                found = self.pending.overlapping(*self._windows.of(tensor), key)
                hit.update((pending.number, pending) for pending in found)
        if hit:
            self.complete([hit[number] for number in sorted(hit)])

    def launch(self, start: Callable[[Sequence[CopyJob]], Flight | None]) -> None:
        """Have what was recorded fetched while more is recorded, but for what must be computed.

        Args:
            start: begins to fetch, beside what was launched before perhaps; None if there was nothing to do.
        """
        copies, jobs = [], []
        for copy in self.pending.all():
            job = None if copy.is_airborne else job_for(copy.source, copy.destination)
            if job is not None:
                copies.append(copy)
                jobs.append(job)
        with self._values.working():
            flight = start(jobs)
        for copy in copies:
            mark_used(copy.source.lazy_base)
            copy.is_airborne = True
        if flight is not None:
            self._flights.append((flight, copies))

    def look(self) -> None:
        """Raise the error of what was launched first, if it has ended in one."""
        if self._flights and self._flights[0][0].is_over:
            self._land(*self._flights.pop(0))

    def land(self) -> None:
        """Wait for all that was launched."""
        while self._flights:
            self._land(*self._flights.pop(0))

    def _land(self, flight: Flight, copies: Sequence[Pending]) -> None:
        flight.land()
        for copy in copies:
            self.pending.remove(copy)
        if self._keep_completed:
            self.completed.extend(_remember(copy) for copy in copies)

    def close(self) -> None:
        """Forget what was not carried out, and the model. Nothing writes to that any more."""
        for flight, _ in self._flights:
            flight.wait()
        self._flights.clear()
        self.pending = PendingCopies()
        self.completed.clear()
        self.watcher = None
        self._storages = ModelStorages(None)

    def complete_all(self) -> None:
        """Carry out everything recorded so far."""
        self.land()
        self._carry_out(self.pending.take_all())

    def complete(self, copies: Sequence[Pending]) -> None:
        """Fetch what `copies`, which are pending, need and carry them out."""
        waiting = [copy for copy in copies if not copy.is_airborne]
        if len(waiting) < len(copies):
            self.land()
        for copy in waiting:
            self.pending.remove(copy)
        self._carry_out(waiting)

    def _carry_out(self, copies: Sequence[Pending]) -> None:
        if not copies:
            return
        for copy in copies:
            mark_used(copy.source.lazy_base)
        if self._dry_run:
            self.planned.extend(copies)
            return
        with self._values.working():
            jobs, computed = [], []
            for copy in copies:
                job = job_for(copy.source, copy.destination)
                if job is None:
                    computed.append(copy)
                else:
                    jobs.append(job)
            if jobs:
                self._values.fill(jobs)
            for batch in _batches(computed, self._batch_bytes):
                values = self._values.evaluate([copy.source for copy in batch])
                for copy, value in zip(batch, values, strict=True):
                    copy.destination.copy_(value)
            if self._keep_completed:
                self.completed.extend(_remember(copy) for copy in copies)


def _remember(copy: Pending) -> Completed:
    destination = copy.destination
    geometry = torch.empty(0, dtype=destination.dtype, device="meta").as_strided(
        destination.size(), destination.stride(), destination.storage_offset()
    )
    storage = StorageWeakRef(storage_of(destination))  # type: ignore[no-untyped-call]
    return Completed(storage, geometry, copy.window, copy.source, copy.serial)


def _peel(source: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Skip clones and casts whose result, whole, is about to be copied into `dtype` anyway."""
    while True:
        base = source.lazy_base
        if not isinstance(base, DeferredBase) or base.owned is not None or not is_same_values(base.func):
            return source
        own, seen = base.layout, source.lazy_layout
        whole = own.dtype == seen.dtype and own.view() == seen.view()
        inner = base.args[0]
        if not whole or not isinstance(inner, LazyTensor) or own.dtype not in (inner.dtype, dtype):
            return source
        source = inner


def _batches(copies: Sequence[Pending], limit: int) -> Iterable[list[Pending]]:
    batch: list[Pending] = []
    held = 0
    for copy in copies:
        cost = sum(leaf.shape.numel() * leaf.lazy_layout.itemsize for leaf in leaves_of([copy.source]))
        if batch and held + cost > limit:
            yield batch
            batch, held = [], 0
        batch.append(copy)
        held += cost
    if batch:
        yield batch
