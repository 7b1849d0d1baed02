"""Who reads what, when several ranks of one machine load together: every byte that any needs, once.

Each rank says which bytes it needs, and all compute the same partition from that. Bytes that one rank needs are
read by that rank, straight to where they belong. Bytes that several need are dealt out so that all read
about equally much; each of the several then copies what it needs. Strided demand, such as one rank's columns of
a row-parallel weight, counts as whole covering rows: the other ranks need what lies between.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from streamer.plan.geometry import runs
from streamer.plan.plan import Demand, Request, Slot, assign_pieces, cut_span

__all__ = ["SharedRead", "Span", "pack", "partition", "pieces_of", "spans_of", "unpack"]

#: ``(file, start, end)``, half open.
Span = tuple[int, int, int]

#: What is small is cut smaller, so that every rank gets some of it.
_REQUESTS_PER_RANK = 4
_LEAST_REQUEST_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class SharedRead:
    """One read of a partition.

    Attributes:
        reader: the rank that makes it.
        consumers: the ranks that need some of it, a bit each.
        needed_bytes: of it; the rest are gaps that cost less than another request.
    """

    file: int
    start: int
    end: int
    reader: int
    consumers: int
    needed_bytes: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def is_shared(self) -> bool:
        """Whether anybody but the reader needs it."""
        return self.consumers != 1 << self.reader

    def has_consumer(self, rank: int) -> bool:
        return bool(self.consumers >> rank & 1)


def spans_of(demands: Iterable[Demand], max_gap: int) -> list[Span]:
    """Return the bytes that `demands` cover, sorted and joined where they touch.

    Args:
        max_gap: gaps inside one demand that are covered too.
    """
    joined: list[Span] = []
    for file, start, end in sorted((d.file, *run) for d in demands for run in runs(d.view, max_gap)):
        if joined and joined[-1][0] == file and start <= joined[-1][2]:
            joined[-1] = (file, joined[-1][1], max(end, joined[-1][2]))
        else:
            joined.append((file, start, end))
    return joined


def pack(spans: Sequence[Span]) -> bytes:
    """Write `spans` compactly, for another process on a machine of the same byte order."""
    return array("q", (number for span in spans for number in span)).tobytes()


def unpack(packed: bytes) -> list[Span]:
    numbers = array("q")
    numbers.frombytes(packed)
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


@dataclass(slots=True)
class _Stretch:
    """Bytes that are needed by the same ranks, or many small such stretches."""

    file: int
    start: int
    end: int
    consumers: int
    is_crumbly: bool
    needed: list[tuple[int, int]]

    def needed_in(self, start: int, end: int) -> int:
        if len(self.needed) == 1:
            return end - start
        first = bisect_right(self.needed, start, key=itemgetter(1))
        last = bisect_left(self.needed, end, key=itemgetter(0))
        return sum(min(end, high) - max(start, low) for low, high in self.needed[first:last])


def partition(
    spans: Sequence[Sequence[Span]],
    origins: Mapping[int, Sequence[int]],
    *,
    request_bytes: int,
    coalesce_gap_bytes: int,
) -> list[SharedRead]:
    """Split what all ranks need into reads, in file order.

    Total and deterministic: every rank gets the same list.

    Args:
        spans: of each rank, from `spans_of`.
        origins: of each file, where its tensors begin, sorted; reads are cut between elements.
        request_bytes: upper bound of one read.
        coalesce_gap_bytes: shorter stretches are read together, with the gaps between them.
    """
    stretches = list(_joined(_stretches(spans), coalesce_gap_bytes))
    total = sum(stretch.end - stretch.start for stretch in stretches)
    request_bytes = min(request_bytes, max(_LEAST_REQUEST_BYTES, total // (_REQUESTS_PER_RANK * len(spans))))
    cut: list[tuple[_Stretch, int, int]] = []
    for stretch in stretches:
        bounds = cut_span(stretch.start, stretch.end, request_bytes, origins.get(stretch.file) or [stretch.start])
        cut.extend((stretch, start, end) for start, end in bounds)
    load = [0] * len(spans)
    for stretch, start, end in cut:
        if stretch.consumers.bit_count() == 1:
            load[stretch.consumers.bit_length() - 1] += end - start
    idle = [(nbytes, rank) for rank, nbytes in enumerate(load)]
    heapq.heapify(idle)
    reads = []
    for stretch, start, end in cut:
        reader = stretch.consumers.bit_length() - 1
        if stretch.consumers.bit_count() > 1:
            nbytes, reader = idle[0]
            heapq.heapreplace(idle, (nbytes + end - start, reader))
        reads.append(SharedRead(stretch.file, start, end, reader, stretch.consumers, stretch.needed_in(start, end)))
    return reads


def _stretches(spans: Sequence[Sequence[Span]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``(file, start, end, consumers)`` of all bytes that anybody needs, in order."""
    edges: list[tuple[int, int, int]] = []
    for rank, own in enumerate(spans):
        for file, start, end in own:
            # A rank's spans are disjoint, so that adding and removing its bit is flipping it.
            edges.append((file, start, 1 << rank))
            edges.append((file, end, 1 << rank))
    edges.sort()
    consumers, file, start = 0, -1, 0
    for at_file, position, bit in edges:
        if consumers and position > start:
            yield file, start, position, consumers
        consumers ^= bit
        file, start = at_file, position


def _joined(stretches: Iterable[tuple[int, int, int, int]], gap: int) -> Iterator[_Stretch]:
    """Join neighbours that the same ranks need, and small ones whoever needs them.

    A small one beside a large one stays alone if it would bring that more consumers: it costs a request, and joining
    them would have the large one pass through shared memory. If it brings none, as the first and last
    row of a strided weight do, they are joined.
    """
    last: _Stretch | None = None
    for file, start, end, consumers in stretches:
        is_small = end - start < gap
        if last is not None and last.file == file and start - last.end <= gap:
            both = last.consumers | consumers
            brings_none = is_small and both == last.consumers
            gets_none = last.end - last.start < gap and both == consumers
            if last.consumers == consumers or (last.is_crumbly and is_small) or brings_none or gets_none:
                if last.end == start:
                    last.needed[-1] = (last.needed[-1][0], end)
                else:
                    last.needed.append((start, end))
                last.end = end
                last.consumers = both
                last.is_crumbly = last.is_crumbly and is_small
                continue
        if last is not None:
            yield last
        last = _Stretch(file, start, end, consumers, is_small, [(start, end)])
    if last is not None:
        yield last


def pieces_of(demands: Sequence[Demand], reads: Sequence[SharedRead], rank: int, max_gap: int) -> dict[int, Request]:
    """Return those of `reads` that `rank` makes or needs, by number, with what each holds of its `demands`."""
    slots: dict[int, Slot] = {}
    in_file: dict[int, list[Slot]] = {}
    for number, read in enumerate(reads):
        if read.has_consumer(rank):
            slots[number] = slot = Slot(read.file, read.start, read.end)
            in_file.setdefault(slot.file, []).append(slot)
        elif read.reader == rank:
            slots[number] = Slot(read.file, read.start, read.end)
    wanted: dict[int, list[tuple[int, int, int, int]]] = {}
    for number, demand in enumerate(demands):
        for run in runs(demand.view, max_gap):
            wanted.setdefault(demand.file, []).append((demand.file, *run, number))
    for file, span in wanted.items():
        assign_pieces(demands, sorted(span), in_file[file])
    return {number: Request(slot.file, slot.start, slot.end, tuple(slot.pieces)) for number, slot in slots.items()}
