"""``s3stream plan`` and ``s3stream explain``: traces an engine's loading code on meta parameters."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from streamer.artifacts.metadata import metadata_folder
from streamer.checkpoint.checkpoint import Checkpoint, TensorInfo
from streamer.cli.output import DOLLARS_PER_REQUEST, Output, model_document, size_text
from streamer.config import StreamConfig
from streamer.dryrun import DryRun, PlannedCopy, dry_run
from streamer.engines import ParallelLayout, find_engine
from streamer.errors import ConfigError
from streamer.fetch.dtypes import torch_shape
from streamer.fetch.engine import FetchEngine, part_of, request_bytes_for, slab_bytes_for
from streamer.plan.sharing import Span, partition
from streamer.plan.timing import StoreModel, predict_node_seconds, project
from streamer.plan.windows import Window
from streamer.sources import open_source, split_file

__all__ = ["Question", "run_explain", "run_plan"]

#: Links to give floor times for: common instance and NIC speeds, in Gbit/s.
_LINKS_GBIT = (10, 25, 100, 400)
#: Nodes to project for.
_FLEETS = (8, 64, 512)


@dataclass(frozen=True, slots=True)
class Question:
    """What to trace: a checkpoint, by which engine's code, spread how, and which rank to show."""

    url: str
    engine: str
    layout: ParallelLayout
    rank: int | None

    def shown(self) -> list[int]:
        """Return the ranks to show.

        Raises:
            ConfigError: there is no such rank.
        """
        ranks = self.layout.ranks
        if self.rank is not None and self.rank >= ranks:
            raise ConfigError(f"there is no rank {self.rank} among {ranks}", hint=f"ranks are 0 to {ranks - 1}")
        return list(range(ranks)) if self.rank is None else [self.rank]


def _read_headers(question: Question, config: StreamConfig, output: Output) -> Checkpoint:
    root, only = split_file(question.url)
    with FetchEngine(open_source(root, config), config) as fetch, output.progress("reading headers") as progress:
        return fetch.open_checkpoint(only=[only] if only else [], progress=progress).checkpoint


def _trace(
    question: Question, checkpoint: Checkpoint, config: StreamConfig, output: Output, ranks: Sequence[int]
) -> Iterator[tuple[int, DryRun]]:
    """Trace one rank after the other; of a large model, one rank's plan alone is hundreds of megabytes."""
    engine = find_engine(question.engine)
    folder = metadata_folder(split_file(question.url)[0], config)
    with output.progress("tracing ranks") as progress:
        for number, rank in enumerate(ranks):
            yield rank, dry_run(engine.build(folder, question.layout, rank), checkpoint, config)
            progress(number + 1, len(ranks))


def run_plan(question: Question, config: StreamConfig, output: Output, store: StoreModel) -> None:
    """Print the plan of all ranks, or of one; the node's total always counts all of them.

    The tensor-parallel ranks of each pipeline stage share, as engines have them do, unless ``share=off``.

    Args:
        store: that times are predicted for: of the slowest rank, and of many nodes.
    """
    shown = question.shown()
    checkpoint = _read_headers(question, config, output)
    layout = question.layout
    is_shared = layout.tensor > 1 and config.share != "off"
    spans: list[list[Span]] = []
    reads: list[list[int]] = []
    ranks: list[dict[str, Any]] = []
    materialised: list[dict[str, Any]] = []
    ignored: list[dict[str, Any]] = []
    for rank, run in _trace(question, checkpoint, config, output, range(layout.ranks)):
        ranks.append(_rank_document(rank, run))
        spans.append(run.spans)
        reads.append([request.nbytes for request in run.plan.requests])
        if rank in shown:
            materialised += [
                {"rank": rank, "operation": read.operation, "tensors": list(read.tensors), "bytes": read.nbytes}
                for read in run.materialised
            ]
            ignored += [{"rank": rank, "name": name, "reason": reason} for name, reason in run.ignored.items()]
        del run  # before the next one is made
    alone = sum(row["fetch_bytes"] for row in ranks)
    if is_shared:
        for first in range(0, layout.ranks, layout.tensor):
            stage = slice(first, first + layout.tensor)
            reads[stage] = _share(ranks[stage], spans[stage], checkpoint, part_of(config, layout.tensor))
    # What is shared is staged, so that there are no more requests at once than slots.
    part = part_of(config, layout.tensor) if is_shared else config
    most = min(config.max_concurrency, part.buffer_bytes // slab_bytes_for(part))
    node_bytes = sum(row["fetch_bytes"] for row in ranks)
    node_requests = sum(row["requests"] for row in ranks)
    document = {
        "engine": question.engine,
        "url": checkpoint.url,
        "tp": layout.tensor,
        "pp": layout.pipeline,
        "ep": layout.experts,
        "share": is_shared,
        "checkpoint_bytes": checkpoint.nbytes,
        "node_bytes": node_bytes,
        "node_bytes_unshared": alone,
        "node_requests": node_requests,
        "request_cost_dollars": round(node_requests * DOLLARS_PER_REQUEST, 6),
        "ranks": [ranks[rank] for rank in shown],
        "floor_seconds": {f"{gbit}_gbit": round(node_bytes * 8 / (gbit * 1e9), 3) for gbit in _LINKS_GBIT},
        "model": model_document(store),
        "predicted_seconds": round(predict_node_seconds(reads, config.concurrency, store, most), 3),
        "projection": _project(reads, config, store, output),
        "materialised": materialised,
        "ignored": ignored,
    }
    output.result(document, lambda console: _show_plan(document, console))


def _rank_document(rank: int, run: DryRun) -> dict[str, Any]:
    plan = run.plan
    return {
        "rank": rank,
        "needed_bytes": plan.needed_bytes,
        "fetch_bytes": plan.fetch_bytes,
        "over_read_bytes": plan.over_read_bytes,
        "requests": len(plan.requests),
        "strided_bytes": plan.strided_bytes,
        "copies": len(run.copies),
    }


def _share(
    rows: Sequence[dict[str, Any]], spans: Sequence[Sequence[Span]], checkpoint: Checkpoint, config: StreamConfig
) -> list[list[int]]:
    """Put into `rows` what each rank reads when these share, and return the bytes of each one's reads."""
    reads = partition(
        spans,
        dict(enumerate(checkpoint.origins())),
        request_bytes=request_bytes_for(config),
        coalesce_gap_bytes=config.coalesce_gap_bytes,
    )
    sizes = []
    for place, row in enumerate(rows):
        own = [read for read in reads if read.reader == place]
        row["requests"] = len(own)
        row["fetch_bytes"] = sum(read.nbytes for read in own)
        row["over_read_bytes"] = sum(read.nbytes - read.needed_bytes for read in own)
        sizes.append([read.nbytes for read in own])
    return sizes


def _project(
    reads: Sequence[Sequence[int]], config: StreamConfig, store: StoreModel, output: Output
) -> list[dict[str, Any]]:
    rows = []
    with output.progress("simulating many nodes") as progress:
        for number, nodes in enumerate(_FLEETS, 1):
            found = project(
                nodes, sum(map(len, reads)), sum(map(sum, reads)), model=store, config=config, ranks=len(reads)
            )
            rows.append(
                {
                    "nodes": nodes,
                    "seconds": round(found.seconds, 3),
                    "refused": found.refused,
                    "gave_up": found.gave_up,
                }
            )
            progress(number, len(_FLEETS))
    return rows


def _show_plan(document: dict[str, Any], console: Console) -> None:
    count = document["tp"] * document["pp"]
    console.print(f"{document['url']} on {count} ranks of the {document['engine']} engine", markup=False)
    table = Table("rank", "needs", "fetches", "of it over-read", "strided", "requests", box=None)
    for row in document["ranks"]:
        table.add_row(
            str(row["rank"]),
            size_text(row["needed_bytes"]),
            size_text(row["fetch_bytes"]),
            size_text(row["over_read_bytes"]),
            size_text(row["strided_bytes"]),
            str(row["requests"]),
        )
    console.print(table)
    total, node = document["checkpoint_bytes"], document["node_bytes"]
    if document["share"]:
        unshared = size_text(document["node_bytes_unshared"])
        console.print(f"\nranks share what they read; on their own they would fetch {unshared}")
    console.print(
        f"\nthe node fetches {size_text(node)}, {node / total if total else 0:.2f} times the checkpoint's "
        f"{size_text(total)}, in {document['node_requests']} requests (${document['request_cost_dollars']})"
    )
    floors = ", ".join(
        f"{seconds} s at {link.partition('_')[0]} Gbit/s" for link, seconds in document["floor_seconds"].items()
    )
    console.print(f"no faster than {floors}")
    model = document["model"]
    console.print(
        f"about {document['predicted_seconds']} s at {model['first_byte_seconds'] * 1000:g} ms to the first byte and "
        f"{size_text(model['bytes_per_second_per_connection'])}/s per connection"
    )
    for row in document["projection"]:
        refusals = f", after {row['refused']} refusals" if row["refused"] else ""
        console.print(f"{row['nodes']} nodes that start together: about {row['seconds']:.0f} s{refusals}")
        if row["gave_up"]:
            console.print(
                f"  {row['gave_up']} reads would give up, and their loads fail: make fewer and larger requests "
                "(request_bytes, buffer_bytes), fewer at once (concurrency), or try more often (retry_attempts)"
            )
    for title, key in (("fetched at once, outside the plan", "materialised"), ("not used", "ignored")):
        if document[key]:
            console.print(f"\n{title}")
            for item in document[key][:20]:
                what = item.get("name") or f"{', '.join(item['tensors'])} for {item['operation']}"
                console.print(f"  rank {item['rank']}: {what} {item.get('reason', '')}".rstrip(), markup=False)


def run_explain(question: Question, name: str, config: StreamConfig, output: Output) -> None:
    """Print where the bytes of one tensor go."""
    checkpoint = _read_headers(question, config, output)
    info = checkpoint.tensors.get(name)
    if info is None:
        near = difflib.get_close_matches(name, checkpoint.tensors, n=1)
        hint = f"did you mean {near[0]}?" if near else "`s3stream inspect` shows what there is"
        raise ConfigError(f"{checkpoint.url} has no tensor {name!r}", hint=hint)
    copies: list[dict[str, Any]] = []
    unused: dict[str, str] = {}
    for rank, run in _trace(question, checkpoint, config, output, question.shown()):
        copies += [
            {
                "rank": rank,
                "parameter": copy.parameter,
                "source": copy.source,
                "destination": copy.destination,
                "bytes": copy.nbytes,
                "computed": copy.computed,
                "text": _sentence(copy, info),
            }
            for copy in run.copies
            if copy.tensor == name
        ]
        if name in run.ignored:
            unused[str(rank)] = run.ignored[name]
    document = {
        "name": name,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "file": checkpoint.files[info.file].key,
        "start": info.start,
        "end": info.end,
        "copies": copies,
        "ignored": unused,
    }
    output.result(document, lambda console: _show_explanation(info, document, console))


def _show_explanation(info: TensorInfo, document: dict[str, Any], console: Console) -> None:
    console.print(
        f"{info.name}: {info.dtype} {list(info.shape)}, bytes {info.start} to {info.end - 1} of {document['file']}",
        markup=False,
    )
    for copy in document["copies"]:
        console.print(f"rank {copy['rank']}: {copy['text']}", markup=False)
    for rank, reason in document["ignored"].items():
        console.print(f"rank {rank}: not used, {reason}", markup=False)


def _sentence(copy: PlannedCopy, info: TensorInfo) -> str:
    source = _window_text(copy.source, torch_shape(info)) or "elements that form no plain window"
    destination = _window_text(copy.destination, copy.parameter_shape) or "elements"
    verb = "go, computed on the way," if copy.computed else "go"
    return f"{source} {verb} to {destination} of {copy.parameter} ({size_text(copy.nbytes)})"


def _window_text(window: Window | None, shape: tuple[int, ...]) -> str:
    """Describe a window by the dimensions that it does not take whole, rows first."""
    if window is None:
        return ""
    if not window:
        return "the scalar"
    names = ["rows", "columns"] if len(window) > 1 else ["elements"]
    names += [f"indices of dimension {number}" for number in range(len(names), len(window))]
    parts = [
        f"{name} {start} to {stop - 1}"
        for name, (start, stop), size in zip(names, window, shape, strict=True)
        if (start, stop) != (0, size)
    ]
    return ", ".join(parts) or f"all {names[0]}"
