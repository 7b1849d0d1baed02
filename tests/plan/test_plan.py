"""Plans read every needed byte exactly once, in requests of the right size, and count what they do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.plan.geometry import View, element_offset, sort_dims
from streamer.plan.plan import Demand, Plan, build_plan
from tests.plan.test_geometry import addresses, bytes_touched, windows


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    """A few tensors in one or two files, each with a few views, which may take the same bytes."""
    found = []
    for file in range(draw(st.integers(1, 2))):
        position = 0
        for _ in range(draw(st.integers(1, 3))):
            position += draw(st.sampled_from([0, 1, 7, 300]))
            views = [sort_dims(view)[0] for view in draw(st.lists(windows(), min_size=1, max_size=3))]
            found += [Demand(file, View(v.offset + position, v.itemsize, v.shape, v.strides), position) for v in views]
            position += max(view.end for view in views) + 8
    return draw(st.permutations(found))


@settings(max_examples=300, deadline=None)
@given(demands(), st.sampled_from([64, 100, 4096]), st.sampled_from([0, 1, 8, 64, 1000]))
def test_every_needed_byte_exactly_once(needed: list[Demand], request_bytes: int, gap: int) -> None:
    plan = build_plan(needed, request_bytes=request_bytes, coalesce_gap_bytes=gap)
    delivered: set[tuple[int, int]] = set()
    read: set[tuple[int, int]] = set()
    for request in plan.requests:
        assert 0 < request.nbytes <= request_bytes
        span = {(request.file, position) for position in range(request.start, request.end)}
        assert not span & read, "a byte is read twice"
        read |= span
        for piece in request.pieces:
            view = needed[piece.demand].view
            assert needed[piece.demand].file == request.file
            for number in range(piece.first, piece.last):
                assert (piece.demand, number) not in delivered
                delivered.add((piece.demand, number))
                start = element_offset(view, number)
                assert request.start <= start
                assert start + view.itemsize <= request.end
    wanted = {(number, n) for number, demand in enumerate(needed) for n in range(len(addresses(demand.view)))}
    assert delivered == wanted
    unique = {(demand.file, position) for demand in needed for position in bytes_touched(demand.view)}
    assert plan.unique_bytes == len(unique)
    assert plan.fetch_bytes == len(read)
    assert plan.over_read_bytes == len(read - unique)
    if gap == 0:
        assert read == unique
    assert plan == build_plan(needed, request_bytes=request_bytes, coalesce_gap_bytes=gap)


def plan_of(*views: View, request_bytes: int = 1 << 20, gap: int = 0) -> Plan:
    return build_plan([Demand(0, view, 0) for view in views], request_bytes=request_bytes, coalesce_gap_bytes=gap)


def rows(start: int, stop: int, columns: int = 100) -> View:
    return View(start * columns * 2, 2, (stop - start, columns), (columns * 2, 2))


def test_neighbours_become_one_request() -> None:
    plan = plan_of(rows(0, 10), rows(10, 20))
    assert [(request.start, request.end) for request in plan.requests] == [(0, 4000)]


@pytest.mark.parametrize(("gap", "count"), [(199, 2), (200, 1)])
def test_gap_rule_is_exact(gap: int, count: int) -> None:
    plan = plan_of(rows(0, 10), rows(11, 20), gap=gap)
    assert len(plan.requests) == count
    assert plan.over_read_bytes == (0 if count == 2 else 200)


def test_strided_demand_reads_whole_covering_rows() -> None:
    columns = View(50 * 2, 2, (1000, 25), (200, 2))  # a quarter of each row
    plan = plan_of(columns, gap=150, request_bytes=1 << 20)
    assert plan.strided_bytes == plan.needed_bytes == 50_000
    assert len(plan.requests) == 1
    assert plan.fetch_bytes == 999 * 200 + 50
    assert plan.over_read_bytes == 999 * 150


def test_distant_pieces_are_read_one_by_one() -> None:
    experts = View(0, 2, (4, 10, 50), (1_000_000, 100, 2))  # this rank's slice of each of four experts
    plan = plan_of(experts, gap=1000)
    assert [request.nbytes for request in plan.requests] == [1000] * 4
    assert plan.over_read_bytes == 0


def test_large_tensors_are_split_evenly_inside_no_element() -> None:
    plan = plan_of(View(0, 8, (1000,), (8,)), request_bytes=3000)
    assert [request.nbytes for request in plan.requests] == [2656, 2672, 2672]
    assert all(request.start % 8 == 0 for request in plan.requests)


def test_unaligned_tensor_is_cut_between_its_own_elements() -> None:
    view = View(13, 4, (1000,), (4,))
    plan = build_plan([Demand(0, view, 13)], request_bytes=500, coalesce_gap_bytes=0)
    assert all((request.start - 13) % 4 == 0 for request in plan.requests)


def test_same_bytes_for_two_parameters_are_read_once() -> None:
    plan = plan_of(rows(0, 10), rows(0, 10))
    assert plan.needed_bytes == 4000
    assert plan.unique_bytes == plan.fetch_bytes == 2000
    assert len(plan.requests[0].pieces) == 2


def test_nothing_needed() -> None:
    plan = plan_of(View(0, 2, (0, 5), (10, 2)))
    assert plan == Plan((), 0, 0, 0)


def test_interleaved_view_is_refused() -> None:
    with pytest.raises(ValueError, match="not in address order"):
        plan_of(View(0, 2, (4, 4), (2, 2)))
