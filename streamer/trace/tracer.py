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
9. `Copies.complete_touching` fetches all that a layer's tensors wait for in one go, for layer-wise processing.
10. Every tensor yielded is a fresh object that takes attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from streamer.checkpoint.checkpoint import TensorInfo
from streamer.errors import LoadError
from streamer.fetch.dtypes import torch_dtype, torch_shape
from streamer.trace.copies import Copies
from streamer.trace.deferral import infer_on_meta, meta_of, snapshot
from streamer.trace.layout import Layout, Views, alias_of
from streamer.trace.lazy import (
    Base,
    DeferredBase,
    FileBase,
    LazyTensor,
    describe_base,
    find_lazies,
    lazy_view,
    map_lazies,
    walk,
)
from streamer.trace.ops import Kind, kind_of, written_arguments
from streamer.trace.pending import storage_key
from streamer.trace.storages import ModelStorages
from streamer.trace.values import Fill, Values

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["Tracer", "Weights"]

#: What engines' ``load_weights`` take.
Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]

_CPU = torch.device("cpu")


class Tracer:
    """Makes the lazy tensors of one load and keeps the books of what becomes of them.

    Args:
        storages: which destinations may be filled later.
        fill: fetches and places the bytes of copy jobs; returns when they are there.
        batch_bytes: how much deferred expressions may hold in memory at once.
        keep_completed: remember every copy, for `streamer.verify`.
        dry_run: nothing is fetched; copies into meta tensors are the demand, and values that an
            operation insists on are zeros.
    """

    def __init__(
        self,
        storages: ModelStorages,
        fill: Fill,
        *,
        batch_bytes: int = 64 << 20,
        keep_completed: bool = False,
        dry_run: bool = False,
    ) -> None:
        self.values = Values(fill, dry_run=dry_run)
        self.copies = Copies(
            storages, self.values, batch_bytes=batch_bytes, dry_run=dry_run, keep_completed=keep_completed
        )
        self.bases: dict[str, FileBase] = {}
        self._layouts: dict[tuple[str, tuple[int, ...]], Layout] = {}

    # -- making lazy tensors -------------------------------------------------------------------------

    def lazy(self, info: TensorInfo) -> LazyTensor:
        """Return a fresh lazy tensor for `info`.

        Raises:
            UnsupportedCheckpointError: torch has no dtype for it.
        """
        key = info.dtype, info.shape
        layout = self._layouts.get(key)
        if layout is None:
            layout = Layout(torch.empty(torch_shape(info), dtype=torch_dtype(info), device="meta"))
            self._layouts[key] = layout
        base = self.bases[info.name] = FileBase(self, layout, info)
        return lazy_view(base, layout, _CPU)

    # -- operations on lazy tensors ------------------------------------------------------------------

    def view(self, func: OpOverload, args: tuple[Any, ...]) -> Any:
        """Do `func`, a view op whose first argument is lazy. The same as `dispatch`, and quick when seen before."""
        lazy: LazyTensor = args[0]
        if lazy.lazy_base.owned is None:
            views = lazy.lazy_layout.recall(func, args[1:])
            if views is not None:
                lazy.lazy_base.looked_at = True
                return _views_of(lazy, views)
        return self.dispatch(func, args, {}, find_lazies(args, {}))

    def copy(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do `func`, a copy from a lazy tensor to another. The same as `dispatch`, and quicker."""
        source: LazyTensor = args[1]
        if source.lazy_base.owned is None:
            source.lazy_base.looked_at = True
            return self.copies.record(args[0], source)
        return self.dispatch(func, args, kwargs, find_lazies(args, kwargs))

    def dispatch(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], lazies: list[LazyTensor]
    ) -> Any:
        """Do `func`, some of whose arguments are lazy, now or later."""
        # A lazy tensor cannot change its own shape: `t_`, `unsqueeze_`, `resize_` and the like.
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], LazyTensor):
            if func._schema.name == "aten::detach_":
                return args[0]
            raise LoadError(
                f"the model code calls {func._schema.name} on checkpoint tensor {describe_base(args[0].lazy_base)}",
                hint="load with mode=eager",
            )
        owned = {}
        for lazy in lazies:
            lazy.lazy_base.looked_at = True
            if lazy.lazy_base.owned is not None:
                owned[id(lazy)] = lazy
        if owned:
            return self._dispatch_owned(func, args, kwargs, lazies, owned)
        return self._dispatch_lazy(func, args, kwargs, lazies)

    def _dispatch_owned(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        lazies: list[LazyTensor],
        owned: dict[int, LazyTensor],
    ) -> Any:
        """Tensors with memory of their own take part as what they are: nothing about them is deferred."""
        real = {number: alias_of(_owned(lazy), lazy.lazy_layout) for number, lazy in owned.items()}

        def replace(lazy: LazyTensor) -> torch.Tensor:
            return real.get(id(lazy), lazy)

        args, kwargs = map_lazies(args, replace), map_lazies(kwargs, replace)
        left = [lazy for lazy in lazies if id(lazy) not in real]
        if left:
            result = self._dispatch_lazy(func, args, kwargs, left)
        else:
            if kind_of(func) is Kind.COPY:  # the barrier left this one to us
                self.copies.complete_touching([args[0]])
                self.copies.writes.note(args[0])
            result = func(*args, **kwargs)
        return _give_back(result, {id(real[number]): lazy for number, lazy in owned.items()})

    def _dispatch_lazy(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], lazies: list[LazyTensor]
    ) -> Any:
        kind = kind_of(func)
        if kind is Kind.COPY and not isinstance(args[0], LazyTensor):
            return self.copies.record(args[0], args[1])
        if kind is Kind.VIEW and len(lazies) == 1 and args and args[0] is lazies[0]:
            views = self._view(func, lazies[0], args, kwargs)
            if views is not None:
                return views
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
        values = self.values.materialise(lazies, func._schema.name)
        return func(*map_lazies(args, values), **map_lazies(kwargs, values))

    def _view(self, func: OpOverload, lazy: LazyTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return views, or None when they look at values in another way than layouts can say, such as conjugated."""
        result = func(lazy.lazy_meta, *args[1:], **kwargs)
        views = lazy.lazy_layout.learn(func, None if kwargs else args[1:], result)
        return None if views is None else _views_of(lazy, views)

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
        real: dict[int, torch.Tensor] = {number: self.own(lazy, name) for number, lazy in written.items()}
        others = [lazy for lazy in lazies if id(lazy) not in real]
        if others:
            values = self.values.materialise(others, name)
            real.update((id(lazy), values(lazy)) for lazy in others)
        result = func(*map_lazies(args, lambda lazy: real[id(lazy)]), **map_lazies(kwargs, lambda lazy: real[id(lazy)]))
        return _give_back(result, {id(real[number]): lazy for number, lazy in written.items()})

    def materialise(self, lazy: LazyTensor, why: str) -> torch.Tensor:
        """Return the values of `lazy` now, as a real tensor; `why` names the operation in the report."""
        return self.values.materialise([lazy], why)(lazy)

    def own(self, lazy: LazyTensor, why: str) -> torch.Tensor:
        """Return a real tensor whose memory `lazy` reads from now on, so that writes to it are seen."""
        base = lazy.lazy_base
        if base.owned is None:
            self.values.note(why, [lazy_view(base, base.layout, lazy.device)])
            self._own(base)
        return alias_of(_owned(lazy), lazy.lazy_layout)

    def _own(self, base: Base) -> None:
        involved = [copy for copy in self.copies.pending.all() if base in walk(copy.source.lazy_base)]
        self.copies.complete(involved)
        for result in base.dependents():
            if result.owned is None:
                self._own(result)
        whole = lazy_view(base, base.layout, _CPU)
        base.owned = self.values.evaluate([whole])[0]

    def close(self) -> None:
        """End the load: from now on, using a leaked lazy tensor raises.

        What it refers to is let go of: the garbage collector cannot follow a cycle through a lazy tensor, so after an
        error the model would stay in memory as long as the process.
        """
        self.values.close()
        self.copies.close()


def _views_of(lazy: LazyTensor, views: Views) -> Any:
    base, device = lazy.lazy_base, lazy.device
    if isinstance(views, Layout):
        return lazy_view(base, views, device)
    sequence, layouts = views
    return sequence(lazy_view(base, layout, device) for layout in layouts)


def _owned(lazy: LazyTensor) -> torch.Tensor:
    assert lazy.lazy_base.owned is not None
    return lazy.lazy_base.owned


def _give_back(result: Any, lazies: dict[int, LazyTensor]) -> Any:
    """Return, in place of real stand-ins, the lazy tensors that in-place operations were called on."""
    if isinstance(result, (list, tuple)):
        return type(result)(lazies.get(id(item), item) for item in result)
    return lazies.get(id(result), result)
