"""Which bytes of a region were read, and what their CRCs say of the whole.

A stored checksum covers a region: a whole file, or a part of it. Reads come in any order and may overlap: bytes
between two wanted ranges are read and dropped, and wanted later. So every range that was read is kept with its CRC,
and ranges that follow each other make paths through the region. The checksum speaks for a range only if it lies on
a path from the region's start to its end: all such paths must come to the same CRC.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streamer.checkpoint.crc import Crc

__all__ = ["Intervals", "Joined", "join"]


class Intervals:
    """A set of bytes, as ranges that neither overlap nor touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.nbytes = 0

    def add(self, start: int, end: int) -> None:
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self.nbytes += end - start - sum(self._ends[at] - self._starts[at] for at in range(first, last))
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def spans(self) -> list[tuple[int, int]]:
        """Return the ranges, in order."""
        return list(zip(self._starts, self._ends, strict=True))

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of ``[start, end)`` that are not in the set."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        inside = zip(self._starts[first:last], self._ends[first:last], strict=True)
        edges = [start, *(edge for pair in inside for edge in pair), end]
        return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


@dataclass(frozen=True, slots=True)
class Joined:
    """What ranges come to.

    Attributes:
        crc: of the region; None when no path leads through it.
        contradiction: a range after which two paths differ, so that one reading was wrong.
        apart: bytes in ranges on no path through the region.
    """

    crc: int | None
    contradiction: tuple[int, int] | None
    apart: int


def join(pieces: Mapping[tuple[int, int], int], start: int, end: int, crc: Crc) -> Joined:
    """Put ranges of a region together.

    Args:
        pieces: CRCs of half-open ranges that are not empty.
        start, end: the region.
    """
    ordered = sorted(pieces)
    leading = _leading_to(reversed(ordered), end)
    upto = {start: 0}
    apart = 0
    for low, high in ordered:
        if low not in upto or high not in leading:
            apart += high - low
            continue
        value = crc.combine(upto[low], pieces[low, high], high - low)
        if upto.setdefault(high, value) != value:
            return Joined(None, (low, high), apart)
    return Joined(upto.get(end), None, apart)


def _leading_to(backwards: Iterable[tuple[int, int]], end: int) -> set[int]:
    """Return the positions from which ranges lead to `end`."""
    leading = {end}
    for low, high in backwards:
        if high in leading:
            leading.add(low)
    return leading
