"""Planning without loading: traces an engine's code on meta parameters, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from streamer.checkpoint.checkpoint import Checkpoint
from streamer.config import StreamConfig
from streamer.engines import RankModel
from streamer.fetch.dtypes import torch_shape
from streamer.fetch.engine import request_bytes_for
from streamer.plan.geometry import View, sort_dims
from streamer.plan.plan import Demand, Plan, build_plan
from streamer.plan.sharing import Span, spans_of
from streamer.plan.windows import Window, window_of
from streamer.report import ForcedRead
from streamer.trace.barrier import tracing
from streamer.trace.lazy import FileBase, LazyTensor, view_of
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
    tracer = Tracer(ModelStorages(target.model), _no_fill, dry_run=True)

    def weights() -> Iterator[tuple[str, LazyTensor]]:
        for info in checkpoint.tensors.values():
            yield info.name, tracer.lazy(info)

    try:
        with tracing(tracer):
            target.load_weights(weights())
            tracer.copies.complete_all()
    finally:
        tracer.close()
    views = leaves_of([copy.source for copy in tracer.copies.planned])  # each once, as a load computes them together
    demands = [_demand(lazy) for lazy in (*views, *tracer.values.would_read)]
    names = _parameter_names(target.model)
    return DryRun(
        plan=build_plan(
            demands,
            request_bytes=request_bytes_for(config),
            coalesce_gap_bytes=config.coalesce_gap_bytes,
        ),
        spans=spans_of(demands, config.coalesce_gap_bytes),
        copies=tuple(planned for copy in tracer.copies.planned for planned in _describe(copy, names)),
        materialised=tuple(tracer.values.materialised),
        ignored=unused_tensors(tracer, checkpoint.tensors),
    )


def _no_fill(jobs: Sequence[object]) -> None:
    raise AssertionError("a dry run reads nothing")


def _demand(lazy: LazyTensor) -> Demand:
    info = _info_base(lazy).info
    view = sort_dims(view_of(lazy.lazy_meta, info.start))[0]
    if not view.is_ordered:  # as the real load does: the covering bytes
        length = view.end - view.offset
        view = View(view.offset, 1, (length,), (1,))
    return Demand(info.file, view, info.start)


def _info_base(lazy: LazyTensor) -> FileBase:
    assert isinstance(lazy.lazy_base, FileBase)
    return lazy.lazy_base


def _parameter_names(model: torch.nn.Module) -> dict[int, list[tuple[str, torch.Tensor]]]:
    names: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(storage_key(tensor), []).append((name, tensor))
    return names


def _describe(copy: Pending, names: Mapping[int, list[tuple[str, torch.Tensor]]]) -> Iterator[PlannedCopy]:
    name, parameter = next(
        (
            (name, tensor)
            for name, tensor in names.get(copy.key, ())
            if view_of(tensor).offset <= copy.window.offset and copy.window.end <= view_of(tensor).end
        ),
        ("?", None),
    )
    destination = None if parameter is None else _window(copy.window, parameter)
    leaves = leaves_of([copy.source])
    for leaf in leaves:
        info = _info_base(leaf).info
        whole = torch.empty(torch_shape(info), dtype=leaf.dtype, device="meta")
        same_type = leaf.dtype == _info_base(leaf).root.dtype
        yield PlannedCopy(
            tensor=info.name,
            source=_window(view_of(leaf.lazy_meta), whole) if same_type else None,
            parameter=name,
            parameter_shape=() if parameter is None else tuple(parameter.shape),
            destination=destination,
            nbytes=view_of(leaf.lazy_meta).nbytes,
            computed=leaf is not copy.source,
        )


def _window(view: View, whole: torch.Tensor) -> Window | None:
    strides = tuple(stride * whole.element_size() for stride in whole.stride())
    origin = int(whole.storage_offset()) * whole.element_size()
    return window_of(view, tuple(whole.shape), strides, origin)
