"""The partition of what several ranks need: everything once, in reads that fit, dealt out evenly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.plan.geometry import View
from streamer.plan.plan import Demand
from streamer.plan.sharing import SharedRead, Span, pack, partition, pieces_of, spans_of, unpack


def dense(start: int, nbytes: int, file: int = 0) -> Demand:
    return Demand(file, View(start, 1, (nbytes,), (1,)), 0)


def columns(start: int, rows: int, row_bytes: int, low: int, high: int, file: int = 0) -> Demand:
    return Demand(file, View(start + low, 1, (rows, high - low), (row_bytes, 1)), start)


def split(demands: Sequence[Sequence[Demand]], gap: int, request_bytes: int = 1000) -> list[SharedRead]:
    return partition(
        [spans_of(own, gap) for own in demands],
        {0: [0], 1: [0]},
        request_bytes=request_bytes,
        coalesce_gap_bytes=gap,
    )


demands = st.lists(
    st.builds(
        dense,
        st.integers(0, 5000),
        st.integers(1, 800),
        st.integers(0, 1),
    )
    | st.builds(
        lambda start, rows, width, low, high: columns(start, rows, width, min(low, high), max(low, high) + 1),
        st.integers(0, 3000),
        st.integers(1, 12),
        st.just(64),
        st.integers(0, 63),
        st.integers(0, 63),
    ),
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(demands, min_size=1, max_size=4), st.sampled_from([0, 20, 300]), st.sampled_from([100, 1000, 100_000]))
def test_every_needed_byte_is_in_one_read_and_reaches_who_needs_it(
    ranks: list[list[Demand]], gap: int, request_bytes: int
) -> None:
    reads = split(ranks, gap, request_bytes)
    assert reads == split(ranks, gap, request_bytes), "ranks would disagree"
    for before, after in itertools.pairwise(reads):
        assert (before.file, before.end) <= (after.file, after.start)
    for read in reads:
        assert 0 < read.nbytes <= request_bytes
        assert 0 <= read.reader < len(ranks)
        if read.consumers.bit_count() == 1:
            assert read.has_consumer(read.reader)
            assert not read.is_shared
    everything: set[tuple[int, int]] = set()
    for rank, own in enumerate(ranks):
        requests = pieces_of(own, reads, rank, gap)
        got = set()
        assert {number for number, read in enumerate(reads) if read.reader == rank} <= requests.keys()
        for number, request in requests.items():
            read = reads[number]
            assert read.has_consumer(rank) or not request.pieces
            for piece in request.pieces:
                got.update(elements(own[piece.demand], piece.first, piece.last))
        needed = {at for demand in own for at in elements(demand, 0, None)}
        assert got == needed
        everything |= needed
    read_bytes = sum(read.nbytes for read in reads)
    assert sum(read.needed_bytes for read in reads) >= len(everything)
    if gap == 0:
        assert read_bytes == len(everything) == sum(read.needed_bytes for read in reads)


def elements(demand: Demand, first: int, last: int | None) -> list[tuple[int, int]]:
    view = demand.view
    if len(view.shape) == 1:
        offsets = [view.offset + at for at in range(view.shape[0])]
    else:
        offsets = [view.offset + r * view.strides[0] + c for r in range(view.shape[0]) for c in range(view.shape[1])]
    return [(demand.file, at) for at in offsets[first:last]]


def test_what_one_rank_needs_is_read_by_that_rank() -> None:
    reads = split([[dense(0, 3000)], [dense(3000, 3000)]], gap=100)
    assert [(read.start >= 3000, read.reader, read.consumers) for read in reads] == [
        (False, 0, 0b01),
        (False, 0, 0b01),
        (False, 0, 0b01),
        (False, 0, 0b01),
        (True, 1, 0b10),
        (True, 1, 0b10),
        (True, 1, 0b10),
        (True, 1, 0b10),
    ]


def test_what_all_need_is_dealt_out_so_that_all_read_equally_much() -> None:
    reads = split([[dense(0, 8000)], [dense(8000, 2000), dense(0, 8000)], [dense(0, 8000)]], gap=100)
    load = [sum(read.nbytes for read in reads if read.reader == rank) for rank in range(3)]
    assert sum(load) == 10_000
    assert max(load) - min(load) <= 1000
    assert {read.consumers for read in reads} == {0b111, 0b010}


def test_columns_of_all_ranks_make_whole_rows() -> None:
    ranks = [[columns(0, 50, 64, 16 * rank, 16 * rank + 16)] for rank in range(4)]
    reads = split(ranks, gap=64)
    assert sum(read.nbytes for read in reads) == 50 * 64
    assert {read.consumers for read in reads} == {0b1111}


def test_small_stretches_join_each_other_but_no_large_one() -> None:
    """A norm between two large tensors of one rank each, then experts too small for a read each."""
    norm = dense(2000, 10)
    experts = [dense(4010 + 50 * number, 50) for number in range(20)]
    reads = split([[dense(0, 2000), norm, *experts[::2]], [norm, dense(2010, 2000), *experts[1::2]]], gap=100)
    by_consumers: dict[int, int] = {}
    for read in reads:
        by_consumers[read.consumers] = by_consumers.get(read.consumers, 0) + read.nbytes
    assert by_consumers == {0b01: 2000, 0b10: 2000, 0b11: 10 + 20 * 50}
    assert len([read for read in reads if read.consumers == 0b11]) <= 3


@pytest.mark.parametrize("spans", [[], [(0, 1, 2)], [(0, 5, 2**40), (163, 0, 1)]])
def test_spans_survive_packing(spans: list[Span]) -> None:
    assert unpack(pack(spans)) == spans


def test_spans_are_joined_where_they_touch() -> None:
    assert spans_of([dense(10, 5), dense(0, 10), dense(20, 5), dense(15, 1, file=1)], 0) == [
        (0, 0, 15),
        (0, 20, 25),
        (1, 15, 16),
    ]
