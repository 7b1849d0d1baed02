"""Planning without loading: traces an engine's code on meta parameters, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from streamer.checkpoint.checkpoint import Checkpoint
from streamer.config import StreamConfig
from streamer.engines import RankModel
from streamer.fetch.engine import request_bytes_for
from streamer.plan.geometry import View, sort_dims
from streamer.plan.plan import Demand, Plan, build_plan
from streamer.plan.sharing import Span, spans_of
from streamer.plan.windows import Window, window_of
from streamer.report import ForcedRead
from streamer.trace.barrier import tracing
from streamer.trace.collector import fewer_full_collections
from streamer.trace.layout import view_of
from streamer.trace.lazy import FileBase, LazyTensor
from streamer.trace.leaks import give_values
from streamer.trace.pending import Pending, storage_key
from streamer.trace.storages import ModelStorages, named_tensors
from streamer.trace.tracer import Tracer
from streamer.trace.unused import unused_tensors
from streamer.trace.values import leaves_of

__all__ = ["DryRun", "PlannedCopy", "dry_run"]


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """Bytes of one checkpoint tensor that one copy takes.

    Attributes:
        tensor: in the checkpoint.
        source: which part of it; None when it is no plain window, such as after a reshape.
        parameter: where they go.
        parameter_shape: its shape.
        destination: which part of it, likewise.
        nbytes: taken from the checkpoint.
        computed: they pass through an expression on the way, such as a cast or `cat`.
    """

    tensor: str
    source: Window | None
    parameter: str
    parameter_shape: tuple[int, ...]
    destination: Window | None
    nbytes: int
    computed: bool


@dataclass(frozen=True, slots=True)
class DryRun:
    """What loading would do on one rank.

    Attributes:
        plan: of a rank that loads on its own.
        spans: bytes that it needs, for `streamer.plan.sharing.partition`.
    """

    plan: Plan
    spans: list[Span]
    copies: tuple[PlannedCopy, ...]
    materialised: tuple[ForcedRead, ...]
    ignored: Mapping[str, str]


def dry_run(target: RankModel, checkpoint: Checkpoint, config: StreamConfig) -> DryRun:
    """Trace the loading of `checkpoint` into one rank's model. Nothing is fetched.

    Raises:
        LoadError: whatever the model's own code finds wrong with the checkpoint.
    """
    with fewer_full_collections():  # the plan, too, is many objects that stay
        return _dry_run(target, checkpoint, config)


def _dry_run(target: RankModel, checkpoint: Checkpoint, config: StreamConfig) -> DryRun:
    tracer = Tracer(ModelStorages(target.model), _no_fill, dry_run=True)

    def weights() -> Iterator[tuple[str, LazyTensor]]:
        for info in checkpoint.tensors.values():
            yield info.name, tracer.lazy(info)

    try:
        with tracing(tracer):
            target.load_weights(weights())
            give_values(target.model, tracer)
            tracer.copies.complete_all()
    finally:
        tracer.close()
    views = leaves_of([copy.source for copy in tracer.copies.planned])  # each once, as a load computes them together
    demands = [_demand(lazy) for lazy in (*views, *tracer.values.would_read)]
    parameters = _parameters(target.model)
    return DryRun(
        plan=build_plan(
            demands,
            request_bytes=request_bytes_for(config),
            coalesce_gap_bytes=config.coalesce_gap_bytes,
        ),
        spans=spans_of(demands, config.coalesce_gap_bytes),
        copies=tuple(planned for copy in tracer.copies.planned for planned in _describe(copy, parameters)),
        materialised=tuple(tracer.values.materialised),
        ignored=unused_tensors(tracer, checkpoint.tensors),
    )


def _no_fill(jobs: Sequence[object]) -> None:
    raise AssertionError("a dry run reads nothing")


def _demand(lazy: LazyTensor) -> Demand:
    info = _info_base(lazy).info
    view = sort_dims(lazy.lazy_layout.view(info.start))[0]
    if not view.is_ordered:  # as the real load does: the covering bytes
        length = view.end - view.offset
        view = View(view.offset, 1, (length,), (1,))
    return Demand(info.file, view, info.start)


def _info_base(lazy: LazyTensor) -> FileBase:
    assert isinstance(lazy.lazy_base, FileBase)
    return lazy.lazy_base


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]
    view: View


def _parameters(model: torch.nn.Module) -> dict[int, list[_Parameter]]:
    found: dict[int, list[_Parameter]] = {}
    for name, tensor in named_tensors(model):
        found.setdefault(storage_key(tensor), []).append(_Parameter(name, tuple(tensor.shape), view_of(tensor)))
    return found


_UNKNOWN = _Parameter("?", (), View(0, 1, (), ()))


def _describe(copy: Pending, parameters: Mapping[int, list[_Parameter]]) -> Iterator[PlannedCopy]:
    start, end = copy.window.offset, copy.window.end
    parameter = next(
        (one for one in parameters.get(copy.key, ()) if one.view.offset <= start and end <= one.view.end), _UNKNOWN
    )
    destination = None if parameter is _UNKNOWN else _window(copy.window, parameter.view)
    for leaf in leaves_of([copy.source]):
        base, view = _info_base(leaf), leaf.lazy_layout.view()
        yield PlannedCopy(
            tensor=base.info.name,
            source=_window(view, base.layout.view()) if leaf.dtype == base.layout.dtype else None,
            parameter=parameter.name,
            parameter_shape=parameter.shape,
            destination=destination,
            nbytes=view.nbytes,
            computed=leaf is not copy.source,
        )


def _window(view: View, whole: View) -> Window | None:
    return window_of(view, whole.shape, whole.strides, whole.offset)
