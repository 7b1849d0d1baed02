"""Tensors of a checkpoint before their bytes are fetched.

Theory of operation. A `LazyTensor` is a view of a `Base`. The base stands for bytes that exist
somewhere: a tensor of a file (`FileBase`) or the result of a pure function (`DeferredBase`). The view
is kept as a `Layout`, from which a tensor on the meta device that aliases one meta storage per base is
made when an op needs it. So torch itself computes what any view op does to sizes, strides and offsets
(once per layout and arguments), and no table of view ops exists to fall behind.

Rule 1: a lazy tensor never has a data pointer of its own. Whatever needs one gets a real tensor.
Rule 2: a write to a lazy tensor gives its base a private, real copy (`Base.own`), which every view of the
base reads from then on, as views of one tensor do. What was recorded before the write keeps the old
values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from streamer.checkpoint.checkpoint import TensorInfo
from streamer.trace.layout import Layout, alias_of, view_of

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = [
    "Base",
    "DeferredBase",
    "FileBase",
    "LazyTensor",
    "file_names",
    "find_lazies",
    "lazy_view",
    "map_lazies",
    "view_of",
    "walk",
]


_wrap = torch.Tensor._make_wrapper_subclass
_narrow = torch.Tensor.narrow
_strided = torch.strided


class Recorder(Protocol):
    """Who decides what happens to lazy tensors: `streamer.trace.tracer.Tracer`."""

    def dispatch(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], lazies: list[LazyTensor]
    ) -> Any:
        """Do `func`, some of whose arguments are `lazies`, now or later."""

    def materialise(self, lazy: LazyTensor, why: str) -> torch.Tensor:
        """Return the values of `lazy`, now."""

    def own(self, lazy: LazyTensor, why: str) -> torch.Tensor:
        """Return a real tensor whose memory `lazy` reads from now on."""


class Base:
    """What lazy views look at.

    Attributes:
        tracer: who records and fetches for it.
        layout: of all of it.
        looked_at: an operation was applied to it, so the model knows it.
        owned: the private real copy after a write, laid out like `root`; None before.
    """

    __slots__ = ("__weakref__", "_dependents", "_root", "layout", "looked_at", "owned", "tracer")

    def __init__(self, tracer: Recorder, layout: Layout, root: torch.Tensor | None = None) -> None:
        self.tracer = tracer
        self.layout = layout
        self.looked_at = False
        self._root = root
        self.owned: torch.Tensor | None = None
        self._dependents: weakref.WeakSet[DeferredBase] | None = None

    @property
    def root(self) -> torch.Tensor:
        """Meta tensor with the base's full geometry; views alias its storage."""
        if self._root is None:
            self._root = self.layout.empty()
        return self._root

    def add_dependent(self, result: DeferredBase) -> None:
        if self._dependents is None:
            self._dependents = weakref.WeakSet()
        self._dependents.add(result)

    def dependents(self) -> list[DeferredBase]:
        """Deferred results computed from this base that somebody still holds."""
        return list(self._dependents or ())


class FileBase(Base):
    """A tensor of the checkpoint, of which views may be fetched alone.

    Attributes:
        used: bytes of it were recorded for a parameter or fetched.
    """

    __slots__ = ("info", "used")

    def __init__(self, tracer: Recorder, layout: Layout, info: TensorInfo) -> None:
        # What `Base` does, without a call for it: there is one of these per tensor.
        self.tracer = tracer
        self.layout = layout
        self.looked_at = False
        self._root = None
        self.owned = None
        self._dependents = None
        self.info = info
        self.used = False


class DeferredBase(Base):
    """The result of ``func(*args, **kwargs)``, some of whose arguments are lazy."""

    __slots__ = ("args", "func", "kwargs")

    def __init__(
        self, tracer: Recorder, root: torch.Tensor, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(tracer, Layout(root), root)
        self.func = func
        self.args = args
        self.kwargs = kwargs
        for lazy in find_lazies(args, kwargs):
            lazy.lazy_base.add_dependent(self)

    def inputs(self) -> list[LazyTensor]:
        return find_lazies(self.args, self.kwargs)


class LazyTensor(torch.Tensor):
    """A tensor with shape, dtype and device, and no data. Takes attributes, as loaders set some.

    Args:
        base: what it looks at.
        meta: how, as an alias of the base's root.
        device: where it pretends to be.
    """

    # Loaders ask for these several times per tensor. Torch's own would tell every function mode each time.
    __slots__ = ("device", "dtype", "lazy_base", "lazy_layout", "ndim", "shape")

    lazy_base: Base
    lazy_layout: Layout

    @staticmethod
    def __new__(cls, base: Base, meta: torch.Tensor, device: torch.device) -> LazyTensor:
        return lazy_view(base, Layout(meta), device)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lazies = find_lazies(args, kwargs)
        return lazies[0].lazy_base.tracer.dispatch(func, args, kwargs, lazies)

    def narrow(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Do as torch does, and remember what it made of a layout: in most loaders, every tensor goes through this."""
        base, layout = self.lazy_base, self.lazy_layout
        known = None if options or base.owned is not None else layout.recall(_narrow, arguments)
        if isinstance(known, Layout):
            base.looked_at = True
            return lazy_view(base, known, self.device)
        result: torch.Tensor = _narrow(self, *arguments, **options)
        if not options and isinstance(result, LazyTensor) and result.lazy_base is base:
            layout.remember(_narrow, arguments, result.lazy_layout)
        return result

    @property
    def lazy_meta(self) -> torch.Tensor:
        """A tensor on meta that views the base's root as this one does."""
        base, layout = self.lazy_base, self.lazy_layout
        return base.root if layout is base.layout else alias_of(base.root, layout)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({describe_base(self.lazy_base)}, shape={tuple(self.shape)}, dtype={self.dtype})"

    # -- whatever bypasses the dispatcher gets a real tensor, never a null pointer --------------------

    def _real(self, why: str) -> torch.Tensor:
        return self.lazy_base.tracer.materialise(self, why)

    def _owned(self, why: str) -> torch.Tensor:
        """A real tensor with memory that later writes through lazy views also reach."""
        return self.lazy_base.tracer.own(self, why)

    def numpy(self, *, force: bool = False) -> Any:
        return self._owned("numpy").numpy(force=force)

    def tolist(self) -> Any:
        return self._real("tolist").tolist()

    def data_ptr(self) -> int:
        return self._owned("data_ptr").data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._owned("untyped_storage").untyped_storage()

    def storage(self) -> Any:
        return self._owned("storage").storage()  # type: ignore[no-untyped-call]

    def share_memory_(self) -> Any:
        raise NotImplementedError(
            f"{self!r} cannot be moved to shared memory while it is loaded; clone it first, or load with mode=eager"
        )

    def __array__(self, dtype: Any = None) -> Any:
        array = self._real("__array__").numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._owned("__dlpack__").__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._owned("__dlpack_device__").__dlpack_device__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._real("pickle").__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = self._real("deepcopy").clone()
        memo[id(self)] = copied
        return copied


def lazy_view(base: Base, layout: Layout, device: torch.device) -> LazyTensor:
    """Return a new lazy tensor that looks at `base` by `layout`."""
    shape, dtype = layout.shape, layout.dtype
    # By position, which takes a sixth less: size, strides, offset, memory format, dtype, layout, device.
    lazy: LazyTensor = _wrap(LazyTensor, shape, layout.strides, layout.offset, None, dtype, _strided, device)
    lazy.lazy_base = base
    lazy.lazy_layout = layout
    lazy.shape = shape
    lazy.ndim = layout.ndim
    lazy.dtype = dtype
    lazy.device = device
    return lazy


def describe_base(base: Base) -> str:
    """Name a base in messages."""
    if isinstance(base, FileBase):
        return base.info.name
    if isinstance(base, DeferredBase):
        names = sorted({describe_base(lazy.lazy_base) for lazy in base.inputs()})
        return f"{base.func._schema.name}({', '.join(names)})"
    return "?"


def file_names(lazies: Sequence[LazyTensor]) -> tuple[str, ...]:
    """Return the checkpoint tensors that `lazies` come from, sorted."""
    names: set[str] = set()
    stack, seen = [lazy.lazy_base for lazy in lazies], set()
    while stack:
        base = stack.pop()
        if id(base) in seen:
            continue
        seen.add(id(base))
        if isinstance(base, FileBase):
            names.add(base.info.name)
        elif isinstance(base, DeferredBase):
            stack.extend(lazy.lazy_base for lazy in base.inputs())
    return tuple(sorted(names))


def find_lazies(args: Any, kwargs: dict[str, Any]) -> list[LazyTensor]:
    """Return the lazy tensors among arguments, nested lists and tuples included."""
    found: list[LazyTensor] = []
    _find(args, found)
    if kwargs:
        _find(kwargs.values(), found)
    return found


def _find(values: Any, found: list[LazyTensor]) -> None:
    for value in values:
        if isinstance(value, LazyTensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _find(value, found)


def map_lazies(value: Any, replace: Any) -> Any:
    """Return `value` with ``replace(lazy)`` for each lazy tensor in nested lists and tuples."""
    if isinstance(value, LazyTensor):
        return replace(value)
    if type(value) in (list, tuple):
        return type(value)(map_lazies(item, replace) for item in value)
    if type(value) is dict:
        return {key: map_lazies(item, replace) for key, item in value.items()}
    return value


def walk(base: Base) -> Iterator[Base]:
    """Yield `base` and every base whose values it still depends on."""
    stack, seen = [base], {id(base)}
    while stack:
        current = stack.pop()
        yield current
        if isinstance(current, DeferredBase) and current.owned is None:
            for lazy in current.inputs():
                if id(lazy.lazy_base) not in seen:
                    seen.add(id(lazy.lazy_base))
                    stack.append(lazy.lazy_base)
