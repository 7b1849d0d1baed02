"""What ranks need of a checkpoint, by an engine's loading code, for ``s3stream fetch``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamer.artifacts.metadata import pull
from streamer.artifacts.ranks import RankSpans
from streamer.checkpoint.checkpoint import Checkpoint
from streamer.checkpoint.partial import Layout
from streamer.cli.output import Output
from streamer.config import StreamConfig
from streamer.dryrun import dry_run
from streamer.engines import ParallelLayout, find_engine
from streamer.errors import ObjectChangedError
from streamer.sources.base import ObjectInfo
from streamer.sources.open import local_path

__all__ = ["trace_ranks"]


def trace_ranks(url: str, layout: Layout, config: StreamConfig, output: Output) -> RankSpans:
    """Return how to learn what the ranks of `layout` need of the checkpoint at `url`. Nothing is contacted yet.

    Raises:
        ConfigError, MissingDependencyError: there is no such engine.
    """
    engine = find_engine(layout.engine)

    def trace(checkpoint: Checkpoint, items: Sequence[ObjectInfo]) -> list[tuple[int, int, int]]:
        folder = _metadata(url, config, items)
        spread = ParallelLayout(layout.tensor, layout.pipeline, layout.experts)
        needed: set[tuple[int, int, int]] = set()
        with output.progress("tracing ranks") as progress:
            for number, rank in enumerate(layout.ranks, 1):
                needed.update(dry_run(engine.build(folder, spread, rank), checkpoint, config).spans)
                progress(number, len(layout.ranks))
        return sorted(needed)

    return RankSpans(layout, trace)


def _metadata(url: str, config: StreamConfig, items: Sequence[ObjectInfo]) -> Path:
    """Return a folder with what is not weights, of the versions in `items`."""
    local = local_path(url)
    if local is not None:
        return local
    pulled = pull(url, config)
    if set(pulled.items) != set(items):
        raise ObjectChangedError(
            "objects were replaced between two listings", url=pulled.url, hint="run the same command again"
        )
    return pulled.folder
