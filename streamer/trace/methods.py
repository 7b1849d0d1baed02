"""What stands in for a few methods of ``torch.Tensor`` while a load traces, in the threads that trace.

Some are ways to a tensor's memory that no operation of the dispatcher takes, and first complete what is pending of it.
`torch.overrides.TorchFunctionMode` is torch's own way to hear of them. But it is told of each look at a tensor's shape,
too, which are fifteen per tensor in vLLM's loading code, and that made the code take 1.7 times as long.

Others are what loading code does with every tensor: ``data``, ``narrow``, and ``copy_`` from a lazy one. `Barrier` has
nothing to do for the first two and records the third, but the dispatcher takes 2 us to call it. If nothing else listens
in, they do here what it would. Indexing is not among them: Python would forever take tensors for sequences
(``PySequence_Check``), because a slot that a class's ``__getitem__`` filled stays filled.

The first part can go when a function mode can say what it wants to hear of, the second with a cheaper dispatch mode.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamer.trace.lazy import LazyTensor

if TYPE_CHECKING:
    from streamer.trace.tracer import Tracer

__all__ = ["standing_in"]

#: Ways to a tensor's memory that are not operations of the dispatcher.
_RAW_READS = (
    "numpy",
    "tolist",
    "data_ptr",
    "storage",
    "untyped_storage",
    "share_memory_",
    "__array__",
    "__dlpack__",
    "__reduce_ex__",
)
#: Classes whose instances do nothing of their own when an operation is applied to them.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

_copy = torch.ops.aten.copy_.default
_dispatch_modes = torch._C._len_torch_dispatch_stack
_dispatch_mode_at = torch._C._get_dispatch_stack_at
_function_modes = torch._C._len_torch_function_stack
_is_grad_enabled = torch.is_grad_enabled
_increment_version = torch._C._increment_version
# Where nothing but plain tensors takes part, for as long as one exists no mode hears of operations.
_Deafness = torch._C._DisableTorchDispatch
# Elsewhere the barrier is taken off torch's stack of modes and put back, as torch does while it calls a mode. The
# former is to be done first in a `try`, where an interrupt by a signal comes after it and so is followed by `_push`.
_pop = torch._C._pop_torch_dispatch_stack
_push = torch._C._push_on_torch_dispatch_stack


@contextmanager
def standing_in(tracer: Tracer, barrier: TorchDispatchMode) -> Iterator[None]:
    """For as long as the context lasts, replace the methods for the calling thread.

    What is pending of a tensor is completed before it is read raw; and assigning a lazy tensor as ``data``, which would
    leave a parameter with a null pointer, assigns its values instead.

    Args:
        barrier: stands on torch's stack of dispatch modes and tells `tracer` of operations.
    """
    methods = _methods()
    here = methods.here
    with methods.replaced():
        before = here.tracers, here.barrier
        here.tracers, here.barrier = (*here.tracers, tracer), barrier
        try:
            yield
        finally:
            here.tracers, here.barrier = before


class _Here(threading.local):
    """Who traces in this thread: all tracers, the innermost last, and its barrier."""

    tracers: tuple[Tracer, ...] = ()
    barrier: Any = None


class _Methods:
    """Replaces the methods from when the first of overlapping loads begins until the last has ended.

    Attributes:
        here: what those that stand in ask.
    """

    def __init__(self) -> None:
        self.here = _Here()
        self._lock = threading.Lock()
        self._users = 0
        self._instead: dict[str, object] = {}
        self._before: dict[str, object] = {}

    @contextmanager
    def replaced(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._replace()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._put_back()

    def _replace(self) -> None:
        here = self.here
        self._instead = {name: _complete_first(getattr(torch.Tensor, name), here) for name in _RAW_READS}
        self._instead["data"] = _data(torch.Tensor.data, here)
        self._instead["narrow"] = _narrow(torch.Tensor.narrow, here)
        self._instead["copy_"] = _copy_from_lazy(torch.Tensor.copy_, here)
        own = vars(torch.Tensor)
        self._before = {name: own[name] for name in self._instead if name in own}  # the others are inherited
        for name, method in self._instead.items():
            setattr(torch.Tensor, name, method)

    def _put_back(self) -> None:
        own = vars(torch.Tensor)
        for name, method in self._instead.items():
            if own.get(name) is not method:
                continue  # somebody replaced ours meanwhile, and may call it: without a tracer it changes nothing
            if name in self._before:
                setattr(torch.Tensor, name, self._before[name])
            else:
                delattr(torch.Tensor, name)


@functools.cache
def _methods() -> _Methods:
    """Return the one there is, as there is one ``torch.Tensor``."""
    return _Methods()


def _complete_first(method: Callable[..., Any], here: _Here) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for tracer in here.tracers:
            if tracer.values.busy or isinstance(self, LazyTensor):
                continue
            if tracer.copies.watcher is not None:
                tracer.copies.watcher.taken(self, method.__name__)
            if tracer.copies.pending:
                tracer.copies.complete_touching([self])
        return method(self, *args, **kwargs)

    return read


def _data(attribute: Any, here: _Here) -> property:
    get = attribute.__get__

    def read(self: torch.Tensor) -> Any:
        if type(self) in _PLAIN and _dispatch_modes() == 1:
            barrier = here.barrier
            if _dispatch_mode_at(0) is barrier and not _function_modes():
                deafness = _Deafness()
                try:
                    return get(self)
                finally:  # or an error's traceback would keep it
                    del deafness
        return get(self)

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        for tracer in reversed(here.tracers):
            if isinstance(value, LazyTensor) and not tracer.values.busy:
                value = tracer.own(value, "data.__set__")
                tracer.copies.writes.note(value)
        attribute.__set__(self, value)

    return property(read, assign, doc=attribute.__doc__)


def _narrow(method: Callable[..., Any], here: _Here) -> Callable[..., Any]:
    @functools.wraps(method)
    def narrow(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A start that is a tensor would be read.
        if type(self) in _PLAIN and len(args) == 3 and type(args[1]) is int and _dispatch_modes() == 1:
            barrier = here.barrier
            if _dispatch_mode_at(0) is barrier and not _function_modes():
                deafness = _Deafness()
                try:
                    return method(self, *args, **kwargs)
                finally:
                    del deafness
        return method(self, *args, **kwargs)

    return narrow


def _copy_from_lazy(method: Callable[..., Any], here: _Here) -> Callable[..., Any]:
    @functools.wraps(method)
    def copy_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) is LazyTensor and type(self) in _PLAIN and _dispatch_modes() == 1:
            barrier = here.barrier
            # If autograd listens, it may have objections.
            if _dispatch_mode_at(0) is barrier and not (kwargs or _function_modes() or _is_grad_enabled()):
                tracer = here.tracers[-1]
                if not tracer.values.busy:
                    try:
                        _pop(None)
                        result = tracer.copy(_copy, (self, args[0]), {})
                    finally:
                        _push(barrier)
                    if not self.is_inference():
                        _increment_version([self])  # as autograd does, to whom this is a write
                    return result
        return method(self, *args, **kwargs)

    return copy_
