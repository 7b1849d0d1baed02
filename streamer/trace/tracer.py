"""The recorder: what happens to lazy tensors, and when their bytes must arrive.

Theory of operation. A copy from a lazy tensor into a parameter is recorded and done later, together
with all others, so that bytes are fetched in few large requests. That is only right if nobody can tell
the difference. The rules that make it so:

1. Only copies into the model's own storages are deferred (`ModelStorages`); others happen at once.
2. An op that is not a pure view and touches bytes with pending copies completes those first (`Barrier`).
3. Pending copies never overlap. A new copy that covers an older one exactly replaces it; one that
   overlaps it otherwise waits for it. So they may be completed in any order.
4. A write to a lazy tensor makes its base a private copy; older copies and results keep the old values.
5. Copies into meta tensors fetch nothing, unless this is a dry run, whose model is on meta.
6. Pure functions of lazy tensors stay deferred; what needs values fetches only the bytes of its views.
7. Everything is completed when the iterator ends and again when ``load_weights`` returns.
8. What bypasses the dispatcher (``numpy``, ``data_ptr``, pickle) gets a real tensor or an error.
9. `prefetch` fetches what a set of lazy tensors needs in one go, for layer-wise processing.
10. Every tensor yielded is a fresh object that takes attributes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from streamer.checkpoint.checkpoint import TensorInfo
from streamer.errors import LoadError
from streamer.fetch.dtypes import torch_dtype, torch_shape
from streamer.trace.deferral import infer_on_meta, meta_of, snapshot
from streamer.trace.lazy import (
    Base,
    DeferredBase,
    FileBase,
    LazyTensor,
    describe_base,
    file_names,
    map_lazies,
    view_of,
    walk,
)
from streamer.trace.ops import Kind, is_same_values, kind_of, written_arguments
from streamer.trace.pending import Pending, PendingCopies, storage_key
from streamer.trace.storages import ModelStorages
from streamer.trace.values import Fill, Values, alias_of, job_for, leaves_of, mark_used
from streamer.trace.writes import WriteLog

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["Materialised", "Tracer"]

_UNSUPPORTED_WRITES = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})


@dataclass(frozen=True, slots=True)
class Materialised:
    """Source bytes that had to be fetched at once, and the operation that needed them."""

    operation: str
    tensors: tuple[str, ...]
    nbytes: int


class Tracer:
    """Makes the lazy tensors of one load and keeps the books of what becomes of them.

    Args:
        storages: which destinations may be filled later.
        fill: fetches and places the bytes of copy jobs; returns when they are there.
        batch_bytes: how much deferred expressions may hold in memory at once.
        dry_run: nothing is fetched; copies into meta tensors are the demand, and values that an
            operation insists on are zeros.
    """

    def __init__(
        self, storages: ModelStorages, fill: Fill, *, batch_bytes: int = 64 << 20, dry_run: bool = False
    ) -> None:
        self._storages = storages
        self._fill = fill
        self._values = Values(fill, dry_run=dry_run)
        self._batch_bytes = batch_bytes
        self._dry_run = dry_run
        self.pending = PendingCopies()
        self.busy = False
        """True while copies are completed; what happens then is ours and not the model's."""
        self.planned: list[Pending] = []
        self.bases: dict[str, FileBase] = {}
        self.writes = WriteLog()
        self.materialised: list[Materialised] = []
        self.casts: Counter[tuple[str, str]] = Counter()
        self.superseded: dict[str, str] = {}

    # -- making lazy tensors -------------------------------------------------------------------------

    def lazy(self, info: TensorInfo) -> LazyTensor:
        """Return a fresh lazy tensor for `info`.

        Raises:
            UnsupportedCheckpointError: torch has no dtype for it.
        """
        root = torch.empty(torch_shape(info), dtype=torch_dtype(info), device="meta")
        base = FileBase(self, root, info)
        self.bases[info.name] = base
        return LazyTensor(base, root, torch.device("cpu"))

    # -- operations on lazy tensors ------------------------------------------------------------------

    def dispatch(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], lazies: list[LazyTensor]
    ) -> Any:
        """Do `func`, some of whose arguments are lazy, now or later."""
        for lazy in lazies:
            if isinstance(lazy.lazy_base, FileBase):
                lazy.lazy_base.looked_at = True
        kind = kind_of(func)
        if kind is Kind.COPY and not isinstance(args[0], LazyTensor):
            return self._record_copy(args[0], args[1])
        if kind is Kind.VIEW and len(lazies) == 1 and args and args[0] is lazies[0]:
            return self._view(func, lazies[0], args, kwargs)
        if kind is Kind.SHAPE_ONLY:
            if any(argument.name == "device" for argument in func._schema.arguments):
                kwargs = {**kwargs, "device": kwargs.get("device") or lazies[0].device}
            return func(*map_lazies(args, meta_of), **map_lazies(kwargs, meta_of))
        if kind in (Kind.MUTATING, Kind.COPY):
            return self._write(func, args, kwargs, lazies)
        if kind in (Kind.PURE, Kind.VIEW):
            deferred = self._defer(func, args, kwargs, lazies)
            if deferred is not None:
                return deferred
        values = self._values_for(lazies, func._schema.name)
        return func(*map_lazies(args, values), **map_lazies(kwargs, values))

    def _view(self, func: OpOverload, lazy: LazyTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(lazy.lazy_meta, *args[1:], **kwargs)
        if isinstance(result, torch.Tensor):
            return LazyTensor(lazy.lazy_base, result, lazy.device)
        return type(result)(LazyTensor(lazy.lazy_base, meta, lazy.device) for meta in result)

    def _defer(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], lazies: list[LazyTensor]
    ) -> LazyTensor | None:
        """Record a pure function for later, or return None when it must be computed now."""
        kept = snapshot((args, kwargs))
        if kept is None:
            return None
        args, kwargs = kept
        root = infer_on_meta(func, args, kwargs)
        if root is None:
            return None
        device = torch.device(kwargs.get("device") or lazies[0].device)
        key = storage_key(root)
        for lazy in lazies:
            if storage_key(lazy.lazy_meta) == key:
                return LazyTensor(lazy.lazy_base, root, device)
        return LazyTensor(DeferredBase(self, root, func, args, kwargs), root, device)

    def _write(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], lazies: list[LazyTensor]) -> Any:
        name = func._schema.name
        written: dict[int, LazyTensor] = {}
        for position, argument in written_arguments(func):
            value = args[position] if position < len(args) else kwargs.get(argument)
            for lazy in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(lazy, LazyTensor):
                    written[id(lazy)] = lazy
        if written and name in _UNSUPPORTED_WRITES:
            raise LoadError(
                f"the model code calls {name} on checkpoint tensor {describe_base(lazies[0].lazy_base)}",
                hint="load with mode=eager",
            )
        real: dict[int, torch.Tensor] = {number: self.own(lazy, name) for number, lazy in written.items()}
        others = [lazy for lazy in lazies if id(lazy) not in real]
        if others:
            values = self._values_for(others, name)
            real.update((id(lazy), values(lazy)) for lazy in others)
        result = func(*map_lazies(args, lambda lazy: real[id(lazy)]), **map_lazies(kwargs, lambda lazy: real[id(lazy)]))
        back = {id(real[number]): lazy for number, lazy in written.items()}
        if isinstance(result, (list, tuple)):
            return type(result)(back.get(id(item), item) for item in result)
        return back.get(id(result), result)

    # -- copies --------------------------------------------------------------------------------------

    def _record_copy(self, destination: torch.Tensor, source: LazyTensor) -> torch.Tensor:
        if destination.shape != source.shape:
            source = LazyTensor(source.lazy_base, source.lazy_meta.expand(destination.shape), source.device)
        if destination.is_meta and not self._dry_run:
            return destination
        key = storage_key(destination)
        if key not in self._storages:
            if not destination.is_meta:
                value = self._values_for([source], "aten::copy_ into a temporary")(source)
                destination.copy_(value)
            return destination
        self.writes.note(destination)
        if destination.dtype != source.dtype:
            self.casts[str(source.dtype), str(destination.dtype)] += 1
        if not destination.numel():
            mark_used(source.lazy_base)
            return destination
        source = _peel(source, destination.dtype)
        window = view_of(destination)
        blocking = []
        for earlier in self.pending.overlapping(destination, key):
            if earlier.window == window and earlier.destination.dtype == destination.dtype:
                self.pending.remove(earlier)
                self.superseded[describe_base(earlier.source.lazy_base)] = describe_base(source.lazy_base)
            else:
                blocking.append(earlier)
        if blocking:
            self.complete(blocking)
        self.pending.add(destination.detach(), source, key)
        return destination

    def complete_touching(self, tensors: Iterable[torch.Tensor]) -> None:
        """Complete the pending copies that write bytes which any of `tensors` holds."""
        hit: dict[int, Pending] = {}
        for tensor in tensors:
            key = storage_key(tensor)
            if key in self.pending:
                hit.update((pending.number, pending) for pending in self.pending.overlapping(tensor, key))
        if hit:
            self.complete([hit[number] for number in sorted(hit)])

    def complete_all(self) -> None:
        """Carry out everything recorded so far."""
        self.complete(self.pending.all())

    def complete(self, copies: Sequence[Pending]) -> None:
        """Fetch what `copies` need and carry them out."""
        if not copies:
            return
        for copy in copies:
            self.pending.remove(copy)
            mark_used(copy.source.lazy_base)
        if self._dry_run:
            self.planned.extend(copies)
            return
        with self._working():
            jobs, computed = [], []
            for copy in copies:
                job = job_for(copy.source, copy.destination)
                if job is None:
                    computed.append(copy)
                else:
                    jobs.append(job)
            if jobs:
                self._fill(jobs)
            for batch in _batches(computed, self._batch_bytes):
                values = self._values.evaluate([copy.source for copy in batch])
                for copy, value in zip(batch, values, strict=True):
                    copy.destination.copy_(value)

    # -- values --------------------------------------------------------------------------------------

    def materialise(self, lazy: LazyTensor, why: str) -> torch.Tensor:
        """Return the values of `lazy` now, as a real tensor; `why` names the operation in the report."""
        return self._values_for([lazy], why)(lazy)

    def own(self, lazy: LazyTensor, why: str) -> torch.Tensor:
        """Return a real tensor whose memory `lazy` reads from now on, so that writes to it are seen."""
        base = lazy.lazy_base
        if base.owned is None:
            self._note(why, [LazyTensor(base, base.root, lazy.device)])
            self._own(base)
        assert base.owned is not None
        return alias_of(base.owned, lazy.lazy_meta)

    def _own(self, base: Base) -> None:
        involved = [copy for copy in self.pending.all() if base in walk(copy.source.lazy_base)]
        self.complete(involved)
        for result in base.dependents():
            if result.owned is None:
                self._own(result)
        whole = LazyTensor(base, base.root, torch.device("cpu"))
        base.owned = self._evaluate([whole])[0]

    def _values_for(self, lazies: list[LazyTensor], why: str) -> Callable[[LazyTensor], torch.Tensor]:
        self._note(why, lazies)
        values = {id(lazy): value for lazy, value in zip(lazies, self._evaluate(lazies), strict=True)}
        return lambda lazy: values[id(lazy)]

    def _note(self, why: str, lazies: Sequence[LazyTensor]) -> None:
        nbytes = sum(view_of(leaf.lazy_meta).nbytes for leaf in leaves_of(lazies))
        if nbytes:
            self.materialised.append(Materialised(why, file_names(lazies), nbytes))

    def prefetch(self, lazies: Sequence[LazyTensor]) -> None:
        """Fetch the bytes of `lazies` together; their next use, each, costs no further read.

        For layer-wise processing, which would otherwise fetch a layer's tensors one after the other.
        """
        with self._working():
            self._values.prefetch(lazies)

    def _evaluate(self, lazies: Sequence[LazyTensor]) -> list[torch.Tensor]:
        with self._working():
            return self._values.evaluate(lazies)

    @contextmanager
    def _working(self) -> Iterator[None]:
        was_busy, self.busy = self.busy, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.busy = was_busy

    @property
    def forced_in_dry_run(self) -> Sequence[LazyTensor]:
        """Views whose values something insisted on, and that a real load would have fetched."""
        return self._values.would_read

    def close(self) -> None:
        """End the load: from now on, using a leaked lazy tensor raises."""
        self._values.close()


def _peel(source: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Skip clones and casts whose result, whole, is about to be copied into `dtype` anyway."""
    while True:
        base = source.lazy_base
        if not isinstance(base, DeferredBase) or base.owned is not None or not is_same_values(base.func):
            return source
        whole = view_of(base.root) == view_of(source.lazy_meta) and base.root.dtype == source.dtype
        inner = base.args[0]
        if not whole or not isinstance(inner, LazyTensor) or base.root.dtype not in (inner.dtype, dtype):
            return source
        source = inner


def _batches(copies: Sequence[Pending], limit: int) -> Iterable[list[Pending]]:
    batch: list[Pending] = []
    held = 0
    for copy in copies:
        cost = sum(leaf.lazy_meta.numel() * leaf.lazy_meta.element_size() for leaf in leaves_of([copy.source]))
        if batch and held + cost > limit:
            yield batch
            batch, held = [], 0
        batch.append(copy)
        held += cost
    if batch:
        yield batch
