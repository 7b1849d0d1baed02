"""What a folder says of itself that holds only those bytes of its weights that some ranks need.

Such a file has its full size, so that every offset is right, and holes where nothing was fetched, which any reader
would take for zeros. So it never gets the name of a whole one: it stays in the work folder, under the name that it
arrived under, which says nothing of weights and is used for no other file ever. The folder's marker maps keys to these
names and says which bytes are there; `streamer.sources.partial` reads by it and refuses all else. That no name is
used twice is what makes it safe beside other processes: what a marker says of a name can be too little or, when the
file is gone, an error, but never of another file.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from streamer.checkpoint.regions import Intervals

__all__ = ["PINS_FILE", "WORK_FOLDER", "Layout", "Partial", "PartialFile", "close_gaps"]

PINS_FILE = ".s3stream.json"
"""The marker of a folder that was filled."""
WORK_FOLDER = ".s3stream"

_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}\.part")


@dataclass(frozen=True, slots=True)
class Layout:
    """Which ranks of which layout, traced by which engine's code.

    Attributes:
        gap_bytes: the `coalesce_gap_bytes` of the plan; a load with a larger one would read gaps that are not there.
        blocks: whether ranges were widened to whole blocks of the manifest, for loads with ``integrity=manifest``.
    """

    engine: str
    tensor: int
    pipeline: int
    experts: bool
    ranks: tuple[int, ...]
    gap_bytes: int = 0
    blocks: bool = False

    def covers(self, other: Layout) -> bool:
        """Whether what was fetched for this one has all that `other` needs."""
        return (
            self._spread() == other._spread()
            and set(other.ranks) <= set(self.ranks)
            and self.gap_bytes >= other.gap_bytes
            and self.blocks >= other.blocks
        )

    def _spread(self) -> tuple[str, int, int, bool]:
        return self.engine, self.tensor, self.pipeline, self.experts

    def join(self, others: Iterable[Layout]) -> tuple[Layout, ...]:
        """Return `others` and this one, as one where they differ in ranks only."""
        joined, rest = self, []
        for other in others:
            if replace(other, ranks=()) == replace(joined, ranks=()):
                joined = replace(joined, ranks=tuple(sorted({*joined.ranks, *other.ranks})))
            else:
                rest.append(other)
        return (*rest, joined)

    def __str__(self) -> str:
        plural = "s" if len(self.ranks) > 1 else ""
        sizes = f"tp={self.tensor}"
        sizes += f", pp={self.pipeline}" if self.pipeline > 1 else ""
        sizes += ", ep" if self.experts else ""
        return f"rank{plural} {', '.join(map(str, self.ranks))} of engine {self.engine} with {sizes}"


@dataclass(frozen=True, slots=True)
class PartialFile:
    """One file of weights that is not whole.

    Attributes:
        name: in the work folder.
        size: bytes of the whole file.
        spans: byte ranges that are there, half open, sorted, neither overlapping nor touching.
    """

    name: str
    size: int
    spans: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self.spans)

    def holds(self, start: int, end: int) -> bool:
        """Whether all of ``[start, end)`` is there."""
        if start == end:
            return True
        at = bisect_right(self.spans, start, key=lambda span: span[0]) - 1
        return at >= 0 and end <= self.spans[at][1]


@dataclass(frozen=True, slots=True)
class Partial:
    """Files that are not whole, by key, and for which ranks they are enough."""

    layouts: tuple[Layout, ...]
    files: Mapping[str, PartialFile]

    def covers(self, layout: Layout) -> bool:
        return any(held.covers(layout) for held in self.layouts)

    def __str__(self) -> str:
        return "; ".join(map(str, self.layouts))

    def to_document(self) -> dict[str, Any]:
        return {
            "layouts": [
                [one.engine, one.tensor, one.pipeline, one.experts, list(one.ranks), one.gap_bytes, one.blocks]
                for one in self.layouts
            ],
            "files": {key: [file.name, file.size, list(map(list, file.spans))] for key, file in self.files.items()},
        }

    @classmethod
    def from_document(cls, document: Any) -> Partial:
        """Read what `to_document` returned.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is something else.
        """
        layouts = tuple(
            Layout(engine, tensor, pipeline, experts, tuple(map(int, ranks)), gap, blocks)
            for engine, tensor, pipeline, experts, ranks, gap, blocks in document["layouts"]
        )
        files = {str(key): _file(*entry) for key, entry in document["files"].items()}
        if not layouts or not files:
            raise ValueError("it names no layout, or no file")
        return cls(layouts, files)


def _file(name: str, size: int, spans: Sequence[Sequence[int]]) -> PartialFile:
    if not _NAME.fullmatch(name):  # it becomes a path
        raise ValueError(f"{name!r} is no name of an unfinished file")
    pairs = tuple((start, end) for start, end in spans)
    edges = [-1, *(edge for pair in pairs for edge in pair)]
    if type(size) is not int or any(type(edge) is not int for edge in edges):
        raise ValueError("a size or a range is no number")
    if any(low >= high for low, high in pairwise(edges)) or edges[-1] > size:
        raise ValueError(f"the ranges of {name} are not in order, or longer than the file")
    return PartialFile(name, size, pairs)


def close_gaps(spans: Iterable[tuple[int, int]], header_bytes: int, gap_bytes: int) -> list[tuple[int, int]]:
    """Return what loads can read of one file, of which `spans` are needed: these, gaps between them, and the header.

    A plan reads a gap of at most `gap_bytes` when bytes on both sides of it are needed. Which of these gaps depends on
    where requests are cut, on which tensors are planned together (``overlap_tensors``), and on which ranks share; so
    all of them count. The header is read by itself.
    """
    found = Intervals()
    found.add(0, header_bytes)
    reach: int | None = None
    for start, end in sorted(spans):
        if end <= header_bytes:
            continue
        start = max(start, header_bytes)
        if reach is not None and reach < start <= reach + gap_bytes:
            start = reach
        found.add(start, end)
        reach = end if reach is None else max(reach, end)
    return found.spans()
