"""Turns demand into a `Plan`: ranged reads that cover every needed byte exactly once.

The rule for joining two ranges: read the gap between them when that costs less than a second request,
that is when it has at most ``coalesce_gap_bytes`` (see `StreamConfig`). Ranges are then cut to at most
``request_bytes``, never inside an element, and trimmed so that no read begins or ends with a gap.

A strided demand, such as one rank's columns of a row-parallel weight, has pieces far smaller than the
break-even gap, so the rule makes it read whole covering rows. The plan reports that over-read. Pieces
further apart than the gap, such as one rank's slice of each expert, are read one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from streamer.plan.geometry import View, count_before, element_offset, runs

__all__ = ["Demand", "Piece", "Plan", "Request", "Slot", "assign_pieces", "build_plan", "cut_span", "one_run"]

#: No element is wider than 16 bytes (complex128), so cuts at multiples of this split no element.
_CUT_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes of one tensor that one copy needs.

    Attributes:
        file: which file, as numbered by the checkpoint.
        view: what to read, in absolute file positions; must be ordered (`View.is_ordered`).
        origin: where the tensor begins in the file; elements are aligned relative to it.
    """

    file: int
    view: View
    origin: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `first` to `last` (half open, index order) of one demand, all inside one request."""

    demand: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Request:
    """One ranged read, half open, and the pieces of demand it satisfies."""

    file: int
    start: int
    end: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """Every read of one rank, in file order.

    Attributes:
        needed_bytes: sum over the demands; equals the bytes of the parameters they fill.
        unique_bytes: distinct file bytes among them; smaller when two parameters take the same bytes.
        strided_bytes: those of the demands that are not one contiguous run.
    """

    requests: tuple[Request, ...]
    needed_bytes: int
    unique_bytes: int
    strided_bytes: int

    @property
    def fetch_bytes(self) -> int:
        """Bytes the requests read."""
        return sum(request.nbytes for request in self.requests)

    @property
    def over_read_bytes(self) -> int:
        """Bytes read that nothing needs: gaps, and the rest of covering rows."""
        return self.fetch_bytes - self.unique_bytes


@dataclass(slots=True)
class Slot:
    """A request under construction."""

    file: int
    start: int
    end: int
    pieces: list[Piece] = field(default_factory=list)


def build_plan(demands: Sequence[Demand], *, request_bytes: int, coalesce_gap_bytes: int) -> Plan:
    """Plan the reads for `demands`.

    Total and deterministic: equal demands give equal plans on every rank.

    Args:
        demands: in the order recorded; pieces refer to positions in this sequence.
        request_bytes: upper bound of one read, at least 64.
        coalesce_gap_bytes: the break-even gap.

    Raises:
        ValueError: a demand whose view is not ordered, which is a bug of the caller.
    """
    needed: list[tuple[int, int, int, int]] = []
    for number, demand in enumerate(demands):
        if not demand.view.is_ordered:
            raise ValueError(f"demand {number} is not in address order: {demand.view}")
        needed.extend((demand.file, *run, number) for run in runs(demand.view, coalesce_gap_bytes))
    needed.sort()
    origins = _origins(demands)
    requests: list[Request] = []
    for file, span in _spans(needed, coalesce_gap_bytes):
        start, end = span[0][1], max(run[2] for run in span)
        slots = [Slot(file, *bounds) for bounds in cut_span(start, end, request_bytes, origins.get(file, [start]))]
        assign_pieces(demands, span, slots)
        requests.extend(closed for closed in (_close(slot, demands) for slot in slots) if closed)
    return Plan(
        requests=tuple(requests),
        needed_bytes=sum(demand.view.nbytes for demand in demands),
        unique_bytes=_unique_bytes(demands),
        strided_bytes=sum(demand.view.nbytes for demand in demands if not one_run(demand.view)),
    )


_Run = tuple[int, int, int, int]  # file, start, end, demand


def _origins(demands: Iterable[Demand]) -> dict[int, list[int]]:
    found: dict[int, set[int]] = {}
    for demand in demands:
        found.setdefault(demand.file, set()).add(demand.origin)
    return {file: sorted(starts) for file, starts in found.items()}


def _spans(needed: Sequence[_Run], max_gap: int) -> Iterable[tuple[int, list[_Run]]]:
    """Group sorted runs that are at most `max_gap` apart."""
    group: list[_Run] = []
    reach = 0
    for run in needed:
        if group and (run[0] != group[0][0] or run[1] - reach > max_gap):
            yield group[0][0], group
            group = []
        reach = max(reach, run[2]) if group else run[2]
        group.append(run)
    if group:
        yield group[0][0], group


def cut_span(start: int, end: int, request_bytes: int, origins: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Split a span into near-equal parts of at most `request_bytes`, at element boundaries."""
    count = max(1, -(-(end - start) // (request_bytes - _CUT_ALIGNMENT)))
    left = start
    for number in range(1, count):
        cut = start + (end - start) * number // count
        origin = origins[max(0, bisect_right(origins, cut) - 1)]
        cut -= (cut - origin) % _CUT_ALIGNMENT
        if cut > left:
            yield left, cut
            left = cut
    yield left, end


def assign_pieces(demands: Sequence[Demand], span: Iterable[_Run], slots: Sequence[Slot]) -> None:
    """Note in each of `slots`, which are sorted and in one file, what it holds of the runs in `span`."""
    starts = [slot.start for slot in slots]
    for _, start, end, number in span:
        view = demands[number].view
        position = bisect_right(starts, start) - 1
        while position < len(slots) and slots[position].start < end:
            slot = slots[position]
            first = count_before(view, max(slot.start, start))
            last = count_before(view, min(slot.end, end))
            if first < last:
                before = slot.pieces[-1] if slot.pieces else None
                if before is not None and before.demand == number and before.last == first:
                    slot.pieces[-1] = Piece(number, before.first, last)
                else:
                    slot.pieces.append(Piece(number, first, last))
            position += 1


def _close(slot: Slot, demands: Sequence[Demand]) -> Request | None:
    """Trim to what is needed; a slot that fell into a gap disappears."""
    if not slot.pieces:
        return None
    starts, ends = [], []
    for piece in slot.pieces:
        view = demands[piece.demand].view
        starts.append(element_offset(view, piece.first))
        ends.append(element_offset(view, piece.last - 1) + view.itemsize)
    return Request(slot.file, min(starts), max(ends), tuple(slot.pieces))


def one_run(view: View) -> bool:
    """Whether the bytes of `view` lie side by side, in whatever order."""
    return view.nbytes == view.end - view.offset


def _unique_bytes(demands: Sequence[Demand]) -> int:
    """Size of the union, which needs the fine runs only where demands lie across each other."""
    ordered = sorted(
        (demand for demand in demands if demand.view.nbytes),
        key=lambda demand: (demand.file, demand.view.offset),
    )
    total = 0
    for _, in_file in groupby(ordered, key=attrgetter("file")):
        group: list[View] = []
        reach = -1
        for demand in in_file:
            if group and demand.view.offset >= reach:
                total += _union(group)
                group = []
            group.append(demand.view)
            reach = max(reach, demand.view.end)
        total += _union(group)
    return total


def _union(views: Sequence[View]) -> int:
    if len(views) == 1:
        return views[0].nbytes
    total, reach = 0, 0
    for start, end in sorted(run for view in views for run in runs(view, 0)):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total
