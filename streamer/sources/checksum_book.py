"""What is known of one file's stored checksum, and what has been read of the regions it covers."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamer.checkpoint.regions import Intervals
from streamer.checkpoint.stored import StoredChecksum, StoredPart
from streamer.errors import MissingDependencyError, StreamError
from streamer.report import FileChecksum
from streamer.sources.base import ObjectInfo
from streamer.sources.hashes import Algorithm, find_algorithm

__all__ = ["FileBook", "Piece", "Readings", "Region", "open_book"]

_PARTLY = "not every byte of it was read"
_TWICE = "bytes of it were read again, in ranges that cannot be put together"
_IN_ORDER = "cannot be put together from ranges; `s3stream verify` reads the file in order and checks it"


@dataclass(slots=True, eq=False)
class Region:
    """What one digest covers.

    Attributes:
        number: 0 for a whole file; parts count from 1.
        pieces: CRCs of what was read.
        position: up to where a hash has got.
        joined: how many pieces the last comparison found; None before the first.
        apart: bytes read of which the digest says nothing.
    """

    part: StoredPart
    number: int
    read: Intervals = field(default_factory=Intervals)
    pieces: dict[tuple[int, int], int] = field(default_factory=dict)
    running: Any = None
    position: int = 0
    is_hashing: bool = False
    is_right: bool = False
    joined: int | None = None
    apart: int = 0

    def __post_init__(self) -> None:
        self.position = self.part.start

    @property
    def nbytes(self) -> int:
        return self.part.end - self.part.start

    @property
    def is_read(self) -> bool:
        return self.read.nbytes == self.nbytes

    @property
    def is_checked(self) -> bool:
        return self.is_right and not self.apart


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one region that one read brought."""

    region: Region
    start: int
    end: int
    memory: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Readings:
    """What one of the ranks that load together has read of a file.

    Attributes:
        pieces: CRCs of ranges.
        unchecked: ranges of which none was computed.
        why_not: see `FileBook`.
    """

    pieces: Mapping[tuple[int, int], int]
    unchecked: Sequence[tuple[int, int]]
    why_not: str


class FileBook:
    """One file's.

    Args:
        why_not: why there is nothing to check; then there are no regions either.
        algorithm: of the regions' digests.

    Attributes:
        why_error: what `why_not` was made of, when a package is missing.
    """

    def __init__(
        self,
        item: ObjectInfo,
        stored: StoredChecksum,
        algorithm: Algorithm | None,
        why_not: str,
        why_error: MissingDependencyError | None = None,
    ) -> None:
        self.item = item
        self.stored = stored
        self.algorithm = algorithm
        self.why_not = why_not
        self.why_error = why_error
        whole = len(stored.parts) == 1 and stored.of_parts is None
        self.regions = [
            Region(part, 0 if whole else number)
            for number, part in enumerate(stored.parts, 1)
            if part.start < part.end and not why_not
        ]
        self._starts = [region.part.start for region in self.regions]
        self._cuts: list[int] | None = None
        self._header_end = item.size
        self._unchecked = Intervals()

    def cut_at(self, starts: Sequence[int]) -> None:
        """Take note of where tensors begin, in order, and that reads of headers are over.

        Reads that overlap mostly do so by whole tensors.
        """
        self._cuts = list(starts)

    def note(self, start: int, buffers: Sequence[memoryview]) -> list[Piece]:
        """Take note of a read, and return what there is to compute, cut where regions and tensors begin.

        Before it is known where tensors begin, reads are of headers, and what comes beyond one, because its length was
        not known, is not part of the load: it is left out, for it will be read again.
        """
        end = start + sum(map(len, buffers))
        if self._cuts is None:
            if start == 0 and end >= 8:
                head = b"".join(bytes(buffer[:8]) for buffer in buffers if len(buffer))[:8]
                self._header_end = 8 + int.from_bytes(head, "little")
            end = min(end, self._header_end)
        if start >= end:
            return []
        if not self.regions:
            self._unchecked.add(start, end)
            return []
        edges = {start, end, *self._between(self._starts, start, end)}
        if self.algorithm is not None and self.algorithm.crc is not None:
            edges.update(self._between(self._cuts or [], start, end))
        ordered = sorted(edges)
        memory = _portions(buffers, [high - low for low, high in itertools.pairwise(ordered)])
        pieces = []
        for (low, high), parts in zip(itertools.pairwise(ordered), memory, strict=True):
            region = self.regions[bisect_right(self._starts, low) - 1]
            pieces.append(Piece(region, low, high, parts))
        return pieces

    @staticmethod
    def _between(positions: Sequence[int], start: int, end: int) -> Sequence[int]:
        return positions[bisect_right(positions, start) : bisect_right(positions, end - 1)]

    def readings(self) -> Readings:
        """Return what was read, for another rank to `add`."""
        pieces = {span: crc for region in self.regions for span, crc in region.pieces.items()}
        return Readings(pieces, self._unchecked.spans(), self.why_not)

    def add(self, rank: int, other: Readings) -> tuple[int, int] | None:
        """Take note of what another rank read of this file.

        Returns:
            A range that had other bytes there than here, if there is one.
        """
        if other.why_not and not self.why_not:
            # What is right here says nothing of what that rank was sent.
            self.why_not = f"on rank {rank}, {other.why_not}"
            for start, end in self.readings().pieces:
                self._unchecked.add(start, end)
            self.regions, self._starts = [], []
        for start, end in other.unchecked:
            self._unchecked.add(start, end)
        for (start, end), crc in other.pieces.items():
            if not self.regions:
                self._unchecked.add(start, end)
                continue
            region = self.regions[bisect_right(self._starts, start) - 1]
            if region.pieces.setdefault((start, end), crc) != crc:
                return start, end
            region.read.add(start, end)
        return None

    def result(self) -> FileChecksum:
        """Sum up."""
        checked = [region for region in self.regions if region.is_checked]
        read = self._unchecked.nbytes + sum(region.read.nbytes for region in self.regions)
        nbytes = sum(region.nbytes for region in checked)
        why = self.why_not
        if not why and len(checked) < len(self.regions):
            twice = any(region.is_read and not region.is_checked for region in self.regions)
            why = _TWICE if twice else _PARTLY
        return FileChecksum(
            algorithm=self.stored.algorithm,
            parts=len(self.regions),
            checked_parts=len(checked),
            checked_bytes=nbytes,
            unchecked_bytes=read - nbytes,
            why=why,
        )


def open_book(item: ObjectInfo, stored: StoredChecksum, *, longest_read_bytes: int | None) -> FileBook:
    """Return the book of a file.

    Args:
        longest_read_bytes: no read is longer, and they come in any order, so that no hash covers more: 0 when others
            read some of the file, None when reads come in order.
    """
    if stored.algorithm is None or stored.why_not:
        return FileBook(item, stored, None, stored.why_not)
    try:
        algorithm = find_algorithm(stored.algorithm)
    except StreamError as error:
        missing = error if isinstance(error, MissingDependencyError) else None
        return FileBook(item, stored, None, f"its stored checksum cannot be computed here: {error}", missing)
    longest = max((part.end - part.start for part in stored.parts), default=0)
    if algorithm.crc is None and longest_read_bytes is not None and longest > longest_read_bytes:
        return FileBook(item, stored, algorithm, f"its stored checksum is {algorithm.name}, which {_IN_ORDER}")
    return FileBook(item, stored, algorithm, "")


def _portions(buffers: Sequence[memoryview], lengths: Sequence[int]) -> Iterator[list[memoryview]]:
    """Cut memory that lies in `buffers`, one after the other, to `lengths`."""
    rest = iter(buffers)
    current = memoryview(b"")
    for length in lengths:
        missing, parts = length, []
        while missing:
            while not len(current):
                current = next(rest)
            parts.append(current[:missing])
            current = current[missing:]
            missing -= len(parts[-1])
        yield parts
