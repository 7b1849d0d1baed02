"""What a load keeps count of, and the report that comes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from streamer.checkpoint.checkpoint import Checkpoint, TensorInfo
from streamer.config import StreamConfig
from streamer.fetch.engine import FetchEngine, Filled
from streamer.fetch.flight import Flight
from streamer.fetch.headers import OpenedCheckpoint
from streamer.report import Cast, Checksums, LoadReport, LoadTimes, PlanCacheUse, Verified
from streamer.share.sharing import Sharing
from streamer.trace.tracer import Tracer
from streamer.trace.unused import unused_tensors
from streamer.transport.stats import TransferStats

__all__ = ["Books", "OpenedPart", "summarise"]


@dataclass(slots=True)
class OpenedPart:
    """A checkpoint that takes part in a load, usually the only one.

    Attributes:
        tensors: those to hand out, in file and data order, under the names the model is given, with
            files numbered across all parts.
        marks: after how many of them what was traced so far is fetched, while the trace goes on.
        first_file: the number of the first of them.
        header_bytes: read to open it.
        before: what the source had done by then.
    """

    engine: FetchEngine
    opened: OpenedCheckpoint
    tensors: list[TensorInfo]
    marks: tuple[int, ...]
    first_file: int
    header_bytes: int
    before: TransferStats

    @property
    def checkpoint(self) -> Checkpoint:
        return self.opened.checkpoint

    @property
    def received_bytes(self) -> int:
        """Since it was opened."""
        return self.engine.source.stats.bytes_received - self.before.bytes_received


@dataclass(slots=True)
class Books:
    """What is summed up while a load runs.

    Attributes:
        began: ``time.monotonic`` when the load did.
        loaded: names of parameters, as the model's code says.
        unexpected: tensors that the model has no place for, likewise.
        flights: what was fetched while the trace went on.
        verified_bytes: read for `verified`, beside the load's own.
    """

    began: float
    fills: list[Filled] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    headers_seconds: float = 0.0
    loaded: frozenset[str] = frozenset()
    unexpected: tuple[str, ...] = ()
    verified: Verified | None = None
    verified_bytes: int = 0
    checksums: Checksums | None = None
    plan_cache: PlanCacheUse | None = None


def summarise(
    config: StreamConfig,
    parts: Sequence[OpenedPart],
    tracer: Tracer,
    books: Books,
    expected: Mapping[str, torch.Tensor],
    sharing: Sharing | None,
) -> LoadReport:
    """Write the report of a load that is over.

    Args:
        expected: what should have got values, by name.
    """
    traced = config.mode == "trace"
    unused: dict[str, str] = {}
    if traced:
        for part in parts:
            unused.update(unused_tensors(tracer, [info.name for info in part.tensors]))
    deltas = [(part.engine.source.stats, part.before) for part in parts]
    fills = books.fills
    return LoadReport(
        url=parts[0].checkpoint.url,
        mode=config.mode,
        expected=tuple(expected),
        loaded=tuple(name for name, tensor in expected.items() if _is_loaded(name, tensor, tracer, books)),
        ignored={name: why for name, why in unused.items() if name not in books.unexpected},
        unexpected=books.unexpected,
        unindexed=tuple(name for part in parts for name in part.checkpoint.unindexed),
        checkpoint_bytes=sum(part.checkpoint.nbytes for part in parts),
        needed_bytes=sum(fill.needed_bytes for fill in fills)
        if traced
        else sum(info.nbytes for part in parts for info in part.tensors),
        fetched_bytes=sum(part.received_bytes - part.header_bytes for part in parts) - books.verified_bytes,
        over_read_bytes=sum(fill.over_read_bytes for fill in fills),
        header_bytes=sum(part.header_bytes for part in parts),
        requests=sum(now.requests - before.requests for now, before in deltas),
        throttled=sum(now.throttled - before.throttled for now, before in deltas),
        hedges=sum(now.hedges - before.hedges for now, before in deltas),
        retries=sum(now.retries - before.retries for now, before in deltas),
        resumed_bytes=sum(now.resumed_bytes - before.resumed_bytes for now, before in deltas),
        copies=tracer.copies.recorded,
        casts=tuple(Cast(source, target, count) for (source, target), count in sorted(tracer.copies.casts.items())),
        materialised=tuple(tracer.values.materialised),
        peak_buffer_bytes=max(part.engine.peak_buffer_bytes for part in parts),
        verified=books.verified,
        sharing=None if sharing is None else sharing.report(),
        checksums=books.checksums,
        plan_cache=books.plan_cache,
        times=_times(parts, books),
    )


def _is_loaded(name: str, tensor: torch.Tensor, tracer: Tracer, books: Books) -> bool:
    return not tensor.is_meta and (name in books.loaded or tracer.copies.writes.reached(tensor))


def _times(parts: Sequence[OpenedPart], books: Books) -> LoadTimes:
    engines = [part.engine for part in parts]
    plan = sum(engine.times.plan for engine in engines)
    fetch = sum(engine.times.fetch for engine in engines) + sum(flight.waited_seconds for flight in books.flights)
    copy = sum(engine.times.copy for engine in engines)
    first = [stamp for engine in engines if (stamp := engine.source.stats.first_byte_at) is not None]
    total = time.monotonic() - books.began
    return LoadTimes(
        headers=books.headers_seconds,
        trace=max(0.0, total - books.headers_seconds - plan - fetch - copy),
        plan=plan,
        first_byte=min(first) - books.began if first else None,
        fetch=fetch,
        copy=copy,
        total=total,
    )
