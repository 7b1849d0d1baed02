"""Geometry, checked against a brute-force model that knows nothing but addresses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.plan.geometry import View, boxes_between, count_before, disjoint, element_offset, runs, sort_dims
from streamer.plan.windows import window_of


def addresses(view: View) -> list[int]:
    """First byte of every element, in index order."""
    return [
        view.offset + sum(i * stride for i, stride in zip(index, view.strides, strict=True))
        for index in itertools.product(*map(range, view.shape))
    ]


def bytes_touched(view: View) -> set[int]:
    return {address + k for address in addresses(view) for k in range(view.itemsize)}


@st.composite
def windows(draw: st.DrawFn, shape: tuple[int, ...] | None = None, itemsize: int | None = None) -> View:
    """A window of a contiguous array, its dimensions perhaps permuted, perhaps broadcast."""
    itemsize = itemsize or draw(st.sampled_from([1, 2, 4, 8]))
    shape = shape if shape is not None else tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    strides: list[int] = []
    stride = itemsize
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    offset, sizes = 0, []
    for size, step in zip(shape, strides, strict=True):
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start, size))
        offset += start * step
        sizes.append(stop - start)
    if draw(st.booleans()):
        sizes.append(draw(st.integers(1, 3)))
        strides.append(0)
    order = draw(st.permutations(range(len(sizes))))
    return View(offset, itemsize, tuple(sizes[dim] for dim in order), tuple(strides[dim] for dim in order))


@given(windows())
def test_sizes(view: View) -> None:
    touched = bytes_touched(view)
    assert view.nbytes == len(touched)
    assert view.end == (max(touched) + 1 if touched else view.offset)
    if touched:
        assert view.is_dense == (addresses(view) == list(range(view.offset, view.end, view.itemsize)))


@given(windows())
def test_sorting_dims_gives_address_order(view: View) -> None:
    ordered, order = sort_dims(view)
    assert ordered.is_ordered
    assert addresses(ordered) == sorted(addresses(view))
    assert tuple(view.shape[dim] for dim in order) == ordered.shape


@given(windows(), st.integers(0, 64))
def test_runs_cover_exactly_with_gaps_up_to_the_limit(view: View, max_gap: int) -> None:
    ordered, _ = sort_dims(view)
    found = list(runs(ordered, max_gap))
    assert found == sorted(found)
    covered = [position for start, end in found for position in range(start, end)]
    assert len(covered) == len(set(covered))
    touched = bytes_touched(ordered)
    assert touched <= set(covered)
    assert all(start in touched and end - 1 in touched for start, end in found)
    for start, end in found:
        missing = [position not in touched for position in range(start, end)]
        longest = max((len(list(group)) for gap, group in itertools.groupby(missing) if gap), default=0)
        assert longest <= max_gap


@given(windows(), st.integers(-3, 200))
def test_count_before(view: View, position: int) -> None:
    ordered, _ = sort_dims(view)
    assert count_before(ordered, position) == sum(address < position for address in addresses(ordered))


@given(windows())
def test_element_offset(view: View) -> None:
    ordered, _ = sort_dims(view)
    assert [element_offset(ordered, n) for n in range(len(addresses(ordered)))] == addresses(ordered)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_partition_a_range_of_elements(shape: list[int], data: st.DataObject) -> None:
    indices = list(itertools.product(*map(range, shape)))
    first = data.draw(st.integers(0, len(indices)))
    last = data.draw(st.integers(first, len(indices)))
    boxes = list(boxes_between(shape, first, last))
    inside = [index for box in boxes for index in itertools.product(*(range(*side) for side in box))]
    assert inside == indices[first:last]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=500)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.data())
def test_disjoint_never_lies_about_windows(shape: tuple[int, ...], data: st.DataObject) -> None:
    first, second = data.draw(windows(shape, 2)), data.draw(windows(shape, 2))
    if disjoint(first, second):
        assert not bytes_touched(first) & bytes_touched(second)


def test_disjoint_sees_columns_side_by_side() -> None:
    left, right = View(0, 2, (8, 3), (16, 2)), View(6, 2, (8, 5), (16, 2))
    assert disjoint(left, right)
    assert disjoint(right, left)
    assert not disjoint(left, View(4, 2, (8, 2), (16, 2)))
    assert not disjoint(left, View(0, 4, (8, 1), (16, 4)))  # another element size: not provable here


def test_disjoint_sees_rows_and_single_columns() -> None:
    assert disjoint(View(0, 2, (2, 8), (16, 2)), View(32, 2, (2, 8), (16, 2)))
    assert disjoint(View(0, 2, (8,), (16,)), View(2, 2, (8,), (16,)))


def strided_grid() -> Iterator[tuple[View, tuple[tuple[int, int], ...]]]:
    yield View(0, 2, (4, 6), (12, 2)), ((0, 4), (0, 6))
    yield View(12 + 4, 2, (2, 3), (12, 2)), ((1, 3), (2, 5))
    yield View(24, 2, (6,), (2,)), ((2, 3), (0, 6))
    yield View(2, 2, (4,), (12,)), ((0, 4), (1, 2))
    yield View(14, 2, (), ()), ((1, 2), (1, 2))


def test_window_of_names_rows_and_columns() -> None:
    for view, expected in strided_grid():
        assert window_of(view, (4, 6), (12, 2), 0) == expected


def test_window_of_refuses_what_is_no_window() -> None:
    assert window_of(View(10, 2, (4,), (2,)), (4, 6), (12, 2), 0) is None  # wraps around a row
    assert window_of(View(0, 2, (4, 3), (12, 4)), (4, 6), (12, 2), 0) is None  # every second column
    assert window_of(View(0, 2, (4, 6), (0, 2)), (4, 6), (12, 2), 0) is None
    assert window_of(View(0, 2, (6, 4), (2, 12)), (4, 6), (12, 2), 0) == ((0, 4), (0, 6))  # transposed
