"""`load` and `iterate`: trace, plan and fetch put together."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from streamer.checkpoint.checkpoint import Checkpoint, TensorInfo
from streamer.config import StreamConfig
from streamer.errors import LoadError, MissingParametersError, shorten
from streamer.fetch.dtypes import check_byte_order
from streamer.fetch.eager import iterate_tensors
from streamer.fetch.engine import FetchEngine, Progress
from streamer.fetch.fill import CopyJob
from streamer.fetch.headers import OpenedCheckpoint
from streamer.plan.plan import Plan
from streamer.report import Cast, LoadReport, LoadTimes
from streamer.sources import Source, open_source, split_file
from streamer.trace.barrier import tracing
from streamer.trace.leaks import refuse_leaks
from streamer.trace.storages import ModelStorages
from streamer.trace.tracer import Tracer
from streamer.trace.unused import unused_tensors

__all__ = ["Weights", "iterate", "load"]

logger = logging.getLogger("streamer")

#: What engines' ``load_weights`` take.
Weights = Iterable[tuple[str, torch.Tensor]]
Options = StreamConfig | Mapping[str, Any] | None


def load(model: Any, url: str | Source, config: Options = None, *, progress: Progress | None = None) -> LoadReport:
    """Load a checkpoint into `model`, fetching only the bytes that its parameters take.

    A model with a method ``load_weights(iterable of (name, tensor))``, as vLLM's and SGLang's have, is
    loaded by that method, whatever it does. Any other ``torch.nn.Module`` is loaded by state-dict names.

    Args:
        model: on any device. Parameters on meta get no values, which is an error, unless
            ``load_weights`` gives them memory.
        url: a folder of safetensors files, one such file, or a source, which is closed afterwards.
        config: a `StreamConfig`, or options for `StreamConfig.resolve`.
        progress: called with bytes arrived and bytes wanted, per batch of reads.

    Returns:
        What was loaded, ignored, fetched, and how long each part took.

    Raises:
        ConfigError, CheckpointError, SourceError: before or while reading; parameters may be half filled.
        MissingParametersError: parameters got no values, and ``strict`` is on.
        LoadError: shapes do not match, or the model kept lazy tensors.
    """
    check_byte_order()
    resolved = _resolve(config)
    source, only = _open(url, resolved)
    with FetchEngine(source, resolved) as engine:
        return _Load(model, engine, progress).run(only)


def iterate(url: str | Source, config: Options = None) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield ``(name, tensor)`` for every tensor, in file order, fetched ahead within ``buffer_bytes``.

    Each tensor owns its memory. Closing the iterator early stops the reads and releases everything.

    Raises:
        ConfigError, CheckpointError, SourceError: from the first ``next`` on.
    """
    check_byte_order()
    resolved = _resolve(config)
    source, only = _open(url, resolved)
    with FetchEngine(source, resolved) as engine:
        opened = engine.open_checkpoint(only=only)
        yield from iterate_tensors(engine, list(opened.checkpoint.tensors.values()), opened.items)


def _resolve(config: Options) -> StreamConfig:
    return config if isinstance(config, StreamConfig) else StreamConfig.resolve(config)


def _open(url: str | Source, config: StreamConfig) -> tuple[Source, str | None]:
    if not isinstance(url, str):
        return url, None
    root, only = split_file(url)
    return open_source(root, config), only


class _Load:
    """One run of `load`, step by step."""

    def __init__(self, model: Any, engine: FetchEngine, progress: Progress | None) -> None:
        self._model = model
        self._engine = engine
        self._config = engine.config
        self._progress = progress
        self._plans: list[Plan] = []
        self._unexpected: list[str] = []
        self._items: Sequence[Any] = ()
        self._header_bytes = 0
        self._before = dataclasses.replace(engine.source.stats)  # a source may have been used before

    def run(self, only: str | None) -> LoadReport:
        began = time.monotonic()
        opened = self._engine.open_checkpoint(only=only)
        self._items = opened.items
        headers_done = time.monotonic()
        self._header_bytes = self._engine.source.stats.bytes_received - self._before.bytes_received
        self._engine.source.stats.first_byte_at = None
        tracer = Tracer(ModelStorages(self._model), self._fill, batch_bytes=self._config.buffer_bytes // 4)
        try:
            weights = self._weights(tracer, opened)
            with tracing(tracer):
                returned = self._loader()(weights)
                tracer.copies.complete_all()
            refuse_leaks(self._model)
        finally:
            tracer.close()
        loaded = self._loaded(tracer, returned)
        times = self._times(began, headers_done)
        report = self._report(tracer, opened.checkpoint, loaded, times)
        if self._config.strict:
            self._require_all(report, opened.checkpoint)
        logger.info("%s", report.summary())
        return report

    def _fill(self, jobs: Sequence[CopyJob]) -> None:
        self._plans.append(self._engine.fill(jobs, self._items, self._progress))

    def _weights(self, tracer: Tracer, opened: OpenedCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
        infos = list(opened.checkpoint.tensors.values())
        if self._config.mode == "eager":
            return iterate_tensors(self._engine, infos, opened.items)
        return _lazy_weights(tracer, infos)

    def _loader(self) -> Callable[[Weights], Any]:
        own = getattr(self._model, "load_weights", None)
        if callable(own):
            return own  # type: ignore[no-any-return]
        if not isinstance(self._model, torch.nn.Module):
            raise LoadError(f"{type(self._model).__name__} is no torch.nn.Module and has no load_weights")
        return functools.partial(_load_by_name, self._model, self._unexpected)

    def _expected(self) -> dict[str, torch.Tensor]:
        if not isinstance(self._model, torch.nn.Module):
            return {}
        if callable(getattr(self._model, "load_weights", None)):
            return dict(self._model.named_parameters(remove_duplicate=False))
        return _state(self._model)

    def _loaded(self, tracer: Tracer, returned: Any) -> tuple[str, ...]:
        listed = returned if isinstance(returned, (set, frozenset, list, tuple)) else ()
        said = {name for name in listed if isinstance(name, str)}
        return tuple(
            name
            for name, tensor in self._expected().items()
            if not tensor.is_meta and (name in said or tracer.copies.writes.reached(tensor))
        )

    def _require_all(self, report: LoadReport, checkpoint: Checkpoint) -> None:
        loaded = set(report.loaded)
        missing = sorted(name for name in report.expected if name not in loaded)
        if not missing:
            return
        unused = [name for name in checkpoint.tensors if name in report.ignored or name in report.unexpected]
        near = {name: _nearest(name, unused or list(checkpoint.tensors)) for name in missing[:5]}
        found = [f"{name} (nearest in the checkpoint: {other})" if other else name for name, other in near.items()]
        raise MissingParametersError(
            f"{checkpoint.url} has no values for {len(missing)} parameters: {shorten(found + missing[5:])}",
            names=missing,
            hint="check that this checkpoint belongs to this model, or set strict=false",
        )

    def _times(self, began: float, headers_done: float) -> LoadTimes:
        spent, first_byte = self._engine.times, self._engine.source.stats.first_byte_at
        now = time.monotonic()
        return LoadTimes(
            headers=headers_done - began,
            trace=max(0.0, now - headers_done - spent.plan - spent.fetch - spent.copy),
            plan=spent.plan,
            first_byte=None if first_byte is None else first_byte - began,
            fetch=spent.fetch,
            copy=spent.copy,
            total=now - began,
        )

    def _report(self, tracer: Tracer, checkpoint: Checkpoint, loaded: tuple[str, ...], times: LoadTimes) -> LoadReport:
        stats, before = self._engine.source.stats, self._before
        traced = self._config.mode == "trace"
        unused = unused_tensors(tracer, checkpoint) if traced else {}
        return LoadReport(
            url=checkpoint.url,
            mode=self._config.mode,
            expected=tuple(self._expected()),
            loaded=loaded,
            ignored={name: why for name, why in unused.items() if name not in self._unexpected},
            unexpected=tuple(self._unexpected),
            unindexed=checkpoint.unindexed,
            checkpoint_bytes=checkpoint.nbytes,
            needed_bytes=sum(plan.needed_bytes for plan in self._plans) if traced else checkpoint.nbytes,
            fetched_bytes=stats.bytes_received - before.bytes_received - self._header_bytes,
            over_read_bytes=sum(plan.over_read_bytes for plan in self._plans),
            header_bytes=self._header_bytes,
            requests=stats.requests - before.requests,
            retries=stats.retries - before.retries,
            resumed_bytes=stats.resumed_bytes - before.resumed_bytes,
            casts=tuple(Cast(source, target, count) for (source, target), count in sorted(tracer.copies.casts.items())),
            materialised=tuple(tracer.values.materialised),
            peak_buffer_bytes=self._engine.peak_buffer_bytes,
            times=times,
        )


def _lazy_weights(tracer: Tracer, infos: Sequence[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    for info in infos:
        yield info.name, tracer.lazy(info)
    tracer.copies.complete_all()


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _load_by_name(model: torch.nn.Module, unexpected: list[str], weights: Weights) -> set[str]:
    """Copy tensors to the parameters and buffers of the same names."""
    targets = _state(model)
    loaded = set()
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            unexpected.append(name)
            continue
        if target.is_meta:
            raise LoadError(
                f"parameter {name} is on the meta device and has no memory",
                hint="call model.to_empty(device=...) first",
            )
        if target.shape != tensor.shape:
            raise LoadError(
                f"{name} has shape {list(tensor.shape)} in the checkpoint and {list(target.shape)} in the model"
            )
        target.copy_(tensor)
        loaded.add(name)
    return loaded


def _nearest(name: str, candidates: Sequence[str]) -> str | None:
    """Find the most similar name, among those that end alike when there are any."""
    alike = [other for other in candidates if other.rpartition(".")[2] == name.rpartition(".")[2]]
    found = difflib.get_close_matches(name, (alike or candidates)[:2000], n=1, cutoff=0.4)
    return found[0] if found else None
