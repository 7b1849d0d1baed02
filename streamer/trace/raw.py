"""Completes pending copies before code reaches a tensor's memory by another way than an operation.

`torch.overrides.TorchFunctionMode` is torch's own way to hear of this. But it is told of each function of torch and
of each look at a tensor's shape, which are twenty per tensor in vLLM's loading code and made that take 1.7 times as
long. The ways to raw memory are ten methods. So while a load traces, those of ``torch.Tensor`` are replaced by
methods that ask whether the thread they run in traces, and do what they did before.

This can go when a function mode can say which functions it wants to hear of.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from streamer.trace.lazy import LazyTensor

if TYPE_CHECKING:
    from streamer.trace.tracer import Tracer

__all__ = ["watching_raw_memory"]

#: Ways to a tensor's memory that are not operations of the dispatcher.
_READS = (
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


@contextmanager
def watching_raw_memory(tracer: Tracer) -> Iterator[None]:
    """For as long as the context lasts, complete what is pending of a tensor before the calling thread reads it raw.

    Assigning a lazy tensor as ``data``, which would leave a parameter with a null pointer, assigns its values instead.
    """
    methods = _methods()
    with methods.replaced():
        before = methods.here.tracers
        methods.here.tracers = (*before, tracer)
        try:
            yield
        finally:
            methods.here.tracers = before


class _Here(threading.local):
    """The tracers of this thread, the innermost last."""

    tracers: tuple[Tracer, ...] = ()


class _Methods:
    """Replaces methods of ``torch.Tensor`` from when the first of overlapping loads begins until the last has ended.

    Attributes:
        here: for whom they ask.
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
        own = vars(torch.Tensor)
        self._before = {name: own[name] for name in (*_READS, "data") if name in own}  # the others are inherited
        self._instead = {name: _complete_first(getattr(torch.Tensor, name), self.here) for name in _READS}
        self._instead["data"] = _data(torch.Tensor.data, self.here)
        for name, method in self._instead.items():
            setattr(torch.Tensor, name, method)

    def _put_back(self) -> None:
        own = vars(torch.Tensor)
        for name, method in self._instead.items():
            if own.get(name) is not method:
                continue  # somebody replaced ours meanwhile, and may call it: it does no more than what it replaced
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
            if tracer.copies.pending and not tracer.values.busy and not isinstance(self, LazyTensor):
                tracer.copies.complete_touching([self])
        return method(self, *args, **kwargs)

    return read


def _data(attribute: Any, here: _Here) -> property:
    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        for tracer in reversed(here.tracers):
            if isinstance(value, LazyTensor) and not tracer.values.busy:
                value = tracer.own(value, "data.__set__")
                tracer.copies.writes.note(value)
        attribute.__set__(self, value)

    return property(attribute.__get__, assign, doc=attribute.__doc__)
