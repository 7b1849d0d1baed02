"""Makes deferral invisible: whoever touches bytes with pending copies finds them copied.

`Barrier` sees every operation of the thread that loads (other threads must not read parameters while
they are loaded). `streamer.trace.methods` sees the few ways to a tensor's memory that do not go through an operation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamer.trace.collector import fewer_full_collections
from streamer.trace.lazy import LazyTensor
from streamer.trace.methods import standing_in
from streamer.trace.ops import Kind, Kinds, written_arguments

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from streamer.trace.tracer import Tracer

__all__ = ["tracing"]

# Looking up an enum's member takes as long as what is done with it here.
_VIEW, _COPY, _SHAPE_ONLY, _MUTATING = Kind.VIEW, Kind.COPY, Kind.SHAPE_ONLY, Kind.MUTATING


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """Watch the calling thread for as long as the context lasts."""
    _keep_dynamo_out()
    with ExitStack() as stack:
        stack.enter_context(fewer_full_collections())
        stack.enter_context(torch.no_grad())
        barrier = stack.enter_context(Barrier(tracer))
        stack.enter_context(standing_in(tracer, barrier))
        tracer.values.barrier = barrier
        yield


@functools.cache
def _keep_dynamo_out() -> None:
    """Keep Dynamo from compiling frames of ours, when model code calls a compiled function while it loads.

    Frames of the function itself it leaves alone, because a dispatch mode is on; inside that mode's own code none is
    (``torch/_dynamo/convert_frame.py``).
    """
    import torch._dynamo.trace_rules

    torch._dynamo.trace_rules.add("streamer")


class Barrier(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Completes pending copies before an operation that could tell that they are pending."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer
        self._kinds = Kinds()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep `__torch_dispatch__` from being wrapped in ``torch._dynamo.disable``, which takes 0.6 us a call.

        `_keep_dynamo_out` does what that would.
        """
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind, run = self._kinds.get(id(func)) or self._kinds.learn(func)
        if kind is _VIEW:
            if kwargs or not args:
                return run(*args, **(kwargs or {}))
            return self._tracer.view(func, args) if type(args[0]) is LazyTensor else run(*args)
        tracer = self._tracer
        kwargs = kwargs or {}
        if not tracer.values.busy:
            if kind is _COPY and type(args[1]) is LazyTensor and type(args[0]) is not LazyTensor:
                return tracer.copy(func, args, kwargs)  # which also looks after what it overlaps
            if kind is not _SHAPE_ONLY:
                if tracer.copies.watcher is not None:
                    tracer.copies.watcher.saw(func, args, kwargs)
                if tracer.copies.pending:
                    tracer.copies.complete_touching(_plain_tensors((args, kwargs)))
                if kind is _MUTATING or kind is _COPY:
                    self._note_writes(func, args, kwargs)
        return run(*args, **kwargs)

    def _note_writes(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for position, name in written_arguments(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _plain_tensors([value]):
                self._tracer.copies.writes.note(tensor)


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, torch.Tensor):
            if not isinstance(item, LazyTensor):
                yield item
        elif isinstance(item, (list, tuple, dict)):
            yield from _plain_tensors(item)
