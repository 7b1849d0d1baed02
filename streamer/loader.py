"""`load` and `iterate`: trace, plan and fetch put together."""

from __future__ import annotations

import functools
import logging
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from streamer.config import StreamConfig
from streamer.errors import LoadError
from streamer.fetch.dtypes import check_byte_order
from streamer.fetch.eager import iterate_tensors
from streamer.fetch.engine import FetchEngine, Progress
from streamer.missing import missing_parameters
from streamer.plan_cache.cache import Circumstances
from streamer.recording import recording
from streamer.report import LoadReport
from streamer.session import LoadSession, OpenedPart
from streamer.share.group import Group, ProcessGroup
from streamer.sources import Source, open_source, split_file
from streamer.spans import span
from streamer.trace.tracer import Weights

__all__ = ["Weights", "iterate", "load"]

logger = logging.getLogger("streamer")

Options = StreamConfig | Mapping[str, Any] | None


def load(
    model: Any,
    url: str | Source,
    config: Options = None,
    *,
    progress: Progress | None = None,
    group: dist.ProcessGroup | Group | None = None,
) -> LoadReport:
    """Load a checkpoint into `model`, fetching only the bytes that its parameters take.

    A model with a method ``load_weights(iterable of (name, tensor))``, as vLLM's and SGLang's have, is
    loaded by that method, whatever it does. Any other ``torch.nn.Module`` is loaded by state-dict names.

    Args:
        model: on any device. Parameters on meta get no values, which is an error, unless
            ``load_weights`` gives them memory.
        url: a folder of safetensors files, one such file, or a source, which is closed afterwards.
        config: a `StreamConfig`, or options for `StreamConfig.resolve`.
        progress: called with bytes arrived and bytes wanted, per batch of reads.
        group: the ranks that load this checkpoint together, all of which call this: a gloo group, or something else
            with the methods of `streamer.share.group.Group`. Those on one machine fetch each byte once; see ``share``.

    Returns:
        What was loaded, ignored, fetched, and how long each part took.

    Raises:
        ConfigError, CheckpointError, SourceError: before or while reading; parameters may be half filled.
        MissingParametersError: parameters got no values, and ``strict`` is on.
        LoadError: shapes do not match, or the model kept lazy tensors, or another rank of `group` is gone. Whatever
            another rank raises is raised on all, with its number.
    """
    check_byte_order()
    resolved = _resolve(config)
    source, only = _open(url, resolved)
    members = ProcessGroup(group) if isinstance(group, dist.ProcessGroup) else group
    with (
        recording(resolved, source.url, _rank(members)) as record,
        LoadSession(
            model, resolved, progress=progress, group=members, circumstances=_circumstances(model, members)
        ) as session,
    ):
        record.reads(source.stats)
        with record.phase("headers"), span("headers"):
            part = session.open(source, only=only)
        with record.phase("weights"), span("trace"):
            _load_with(session, part)
        with record.phase("check"):
            report = record.report = session.report()
            missing = sorted(set(report.expected) - set(report.loaded))
            if missing and resolved.strict:
                raise missing_parameters(report, missing, session.names())
    logger.info("%s", report.summary())
    return report


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


def _rank(group: Group | None) -> int:
    if group is not None:
        return group.rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _circumstances(model: Any, group: Group | None) -> Circumstances | None:
    """Say what the model's own method may go by; loading by names takes no code of the model's."""
    if not callable(getattr(model, "load_weights", None)):
        return None
    rank, size = (group.rank, group.size) if group is not None else (0, 1)
    return Circumstances({"loader": "streamer.load", "rank": str(rank), "size": str(size)})


def _resolve(config: Options) -> StreamConfig:
    return config if isinstance(config, StreamConfig) else StreamConfig.resolve(config)


def _open(url: str | Source, config: StreamConfig) -> tuple[Source, Sequence[str]]:
    if not isinstance(url, str):
        return url, ()
    root, only = split_file(url)
    return open_source(root, config), [only] if only else []


def _load_with(session: LoadSession, part: OpenedPart) -> None:
    """Load by the model's own method, or by names."""
    own = getattr(session.model, "load_weights", None)
    unexpected: list[str] = []
    if not callable(own):
        if not isinstance(session.model, torch.nn.Module):
            raise LoadError(f"{type(session.model).__name__} is no torch.nn.Module and has no load_weights")
        own = functools.partial(_load_by_name, session.expected(), unexpected)
    returned = session.run(own, session.weights(part))
    listed = returned if isinstance(returned, (set, frozenset, list, tuple)) else ()
    session.note(loaded=[name for name in listed if isinstance(name, str)], unexpected=unexpected)


def _load_by_name(targets: Mapping[str, torch.Tensor], unexpected: list[str], weights: Weights) -> set[str]:
    """Copy tensors to the parameters and buffers of the same names."""
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
