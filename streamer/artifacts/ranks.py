"""Which bytes of the weights some ranks of a layout need: what to fetch, if only these load from the folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from streamer.checkpoint.checkpoint import Checkpoint
from streamer.checkpoint.manifest import Manifest
from streamer.checkpoint.partial import Layout, Partial, close_gaps
from streamer.checkpoint.regions import Intervals
from streamer.config import StreamConfig
from streamer.fetch.headers import read_checkpoint
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.pinned import PinnedSource

__all__ = ["Needs", "RankSpans", "Spans", "Trace", "read_headers"]

#: By key, the byte ranges of a file, half open, sorted.
Spans = Mapping[str, Sequence[tuple[int, int]]]

#: Returns what ranks need of a checkpoint, as ``(file, start, end)``; `items` is the listing that it was read from.
Trace = Callable[[Checkpoint, Sequence[ObjectInfo]], Sequence[tuple[int, int, int]]]


async def read_headers(source: Source, config: StreamConfig, items: Sequence[ObjectInfo]) -> Checkpoint:
    """Read the headers of what was listed as `items`.

    Raises:
        CheckpointError, SourceError: see `streamer.errors`.
    """
    return (await read_checkpoint(PinnedSource(source, items), config)).checkpoint


@dataclass(frozen=True, slots=True)
class Needs:
    """What ranks need of a checkpoint."""

    checkpoint: Checkpoint
    layout: Layout
    needed: Sequence[tuple[int, int, int]]

    def spans(self, partial: Partial | None, manifest: Manifest | None) -> Spans:
        """Return all that these ranks, loading alone or together, can read of each file.

        Args:
            partial: what is there already, for other ranks, which may be loaded together with these.
            manifest: to whose blocks loads with ``integrity=manifest`` widen their reads.
        """
        by_file: list[list[tuple[int, int]]] = [[] for _ in self.checkpoint.files]
        for file, start, end in self.needed:
            by_file[file].append((start, end))
        found = {}
        for listed, spans in zip(self.checkpoint.files, by_file, strict=True):
            before = partial.files.get(listed.key) if partial is not None else None
            spans = [*spans, *(before.spans if before is not None else ())]
            spans = close_gaps(spans, listed.header_bytes, self.layout.gap_bytes)
            digests = manifest.files.get(listed.key) if manifest is not None else None
            if manifest is not None and digests is not None:
                blocks = Intervals()
                for start, end in spans:
                    blocks.add(*digests.covering(start, end, manifest.block_bytes))
                spans = blocks.spans()
            found[listed.key] = spans
        return found


@dataclass(frozen=True, slots=True)
class RankSpans:
    """For which ranks to fetch, and how to learn what they need."""

    layout: Layout
    trace: Trace

    def layout_with(self, config: StreamConfig) -> Layout:
        """Return the layout with what `config` adds to its reads."""
        is_checked = config.integrity == "manifest"
        return dataclasses.replace(self.layout, gap_bytes=config.coalesce_gap_bytes, blocks=is_checked)

    def find(self, checkpoint: Checkpoint, items: Sequence[ObjectInfo], config: StreamConfig) -> Needs:
        """Trace. In the calling thread, so that an interrupt ends it.

        Raises:
            StreamError: see `streamer.errors`.
        """
        return Needs(checkpoint, self.layout_with(config), self.trace(checkpoint, items))
