"""Strided views of byte ranges: order, extent, runs, clipping, overlap.

A `View` is what torch calls a strided tensor, in bytes and without data. Everything here is exact
integer arithmetic, so that a plan can be proved to read each needed byte.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Box", "View", "boxes_between", "count_before", "disjoint", "element_offset", "runs", "sort_dims"]

#: Half-open index range per dimension of a view.
Box = tuple[tuple[int, int], ...]


class View(NamedTuple):
    """Elements of `itemsize` bytes at ``offset + sum(index[i] * strides[i])``.

    Attributes:
        offset: position of element 0, in bytes.
        itemsize: bytes per element.
        shape: sizes; () is one element.
        strides: bytes, never negative; 0 repeats the same bytes (a broadcast).
    """

    offset: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past the last byte any element touches; `offset` when empty."""
        end = self.offset + self.itemsize
        for size, stride in zip(self.shape, self.strides, strict=True):
            if not size:
                return self.offset
            end += (size - 1) * stride
        return end

    @property
    def nbytes(self) -> int:
        """Distinct bytes, for views whose elements do not overlap: broadcast dimensions count once."""
        sizes = (size for size, stride in zip(self.shape, self.strides, strict=True) if stride or not size)
        return math.prod(sizes) * self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the view, in its own order, is one contiguous run."""
        expected = self.itemsize
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True

    @property
    def is_ordered(self) -> bool:
        """Whether index order is address order and no two elements overlap, broadcasts apart."""
        reach = self.itemsize
        broadcasting = True
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size <= 1:
                continue
            if stride == 0:
                if not broadcasting:
                    return False
                continue
            broadcasting = False
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
        return True


def sort_dims(view: View) -> tuple[View, tuple[int, ...]]:
    """Permute the dimensions into descending strides.

    Returns:
        The permuted view, and for each of its dimensions the dimension it came from. Copies are
        element-wise, so permuting source and destination alike changes nothing but the order.
    """
    order = tuple(sorted(range(len(view.shape)), key=lambda dim: (-view.strides[dim], dim)))
    return (
        View(
            view.offset,
            view.itemsize,
            tuple(view.shape[dim] for dim in order),
            tuple(view.strides[dim] for dim in order),
        ),
        order,
    )


def runs(view: View, max_gap: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges to read for an ordered view, joining gaps of at most `max_gap` bytes.

    Args:
        view: with `is_ordered`.
        max_gap: unneeded bytes tolerated between two pieces of one run.
    """
    if 0 in view.shape:
        return
    reach = view.itemsize
    split = len(view.shape)  # dimensions before this are enumerated, the others lie inside one run
    for dim in reversed(range(len(view.shape))):
        size, stride = view.shape[dim], view.strides[dim]
        if size > 1 and stride and stride - reach > max_gap:
            break
        reach += (size - 1) * stride
        split = dim
    for index in itertools.product(*(range(size) for size in view.shape[:split])):
        start = view.offset + sum(i * stride for i, stride in zip(index, view.strides, strict=False))
        yield start, start + reach


def count_before(view: View, position: int) -> int:
    """Return how many elements of an ordered view, in index order, begin before byte `position`."""
    rest = position - view.offset
    if rest <= 0 or 0 in view.shape:
        return 0
    inner = math.prod(view.shape)
    count = 0
    for size, stride in zip(view.shape, view.strides, strict=True):
        inner //= size
        if size == 1 or stride == 0:
            continue
        # Index of the last slice along this dimension that begins before the position.
        index = min((rest - 1) // stride, size - 1)
        count += index * inner
        rest -= index * stride
    # What is left is the innermost position, whose broadcast copies all begin at the same byte.
    broadcast = math.prod(
        size for size, stride in zip(view.shape, view.strides, strict=True) if stride == 0 and size > 1
    )
    return count + broadcast


def element_offset(view: View, number: int) -> int:
    """Return the byte at which element `number`, in index order, begins."""
    position = view.offset
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        number, index = divmod(number, size)
        position += index * stride
    return position


def boxes_between(shape: Sequence[int], first: int, last: int) -> Iterator[Box]:
    """Split the elements numbered `first` to `last` (half open, index order) into boxes.

    At most ``2 * len(shape) - 1`` boxes, or one when the range is a whole number of outermost slices.
    """
    if first >= last:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    rest = tuple((0, size) for size in shape[1:])
    head, tail = divmod(first, inner), divmod(last, inner)
    if head[0] == tail[0]:
        for box in boxes_between(shape[1:], head[1], tail[1]):
            yield ((head[0], head[0] + 1), *box)
        return
    whole_from = head[0]
    if head[1]:
        for box in boxes_between(shape[1:], head[1], inner):
            yield ((head[0], head[0] + 1), *box)
        whole_from += 1
    if whole_from < tail[0]:
        yield ((whole_from, tail[0]), *rest)
    if tail[1]:
        for box in boxes_between(shape[1:], 0, tail[1]):
            yield ((tail[0], tail[0] + 1), *box)


def disjoint(first: View, second: View) -> bool:
    """Whether two views of one storage provably share no byte.

    Exact for views whose byte intervals are apart, and for windows of the same array (equal strides),
    which is how fused parameters are filled side by side. Other pairs are reported as overlapping.
    """
    if first.end <= second.offset or second.end <= first.offset:
        return True
    if first.itemsize != second.itemsize:
        return False
    dims = _shared_dims(first, second)
    if dims is None:
        return False
    low, high = (first, second) if first.offset <= second.offset else (second, first)
    shift = high.offset - low.offset
    sizes = {id(first): [d[1] for d in dims], id(second): [d[2] for d in dims]}
    apart = False
    extent: float = math.inf  # bytes available inside the enclosing dimension
    for number, (stride, *_) in enumerate(dims):
        step, shift = divmod(shift, stride)
        reach_low = sizes[id(low)][number]
        reach_high = step + sizes[id(high)][number]
        if max(reach_low, reach_high) * stride > extent:
            return False  # a window that wraps around a row: not the simple case
        if step >= reach_low:
            apart = True
        extent = stride
    return apart and shift == 0


def _shared_dims(first: View, second: View) -> list[tuple[int, int, int]] | None:
    """Return ``(stride, size in first, size in second)`` by descending stride, if the grids agree."""
    sizes: dict[int, tuple[int, int]] = {}
    for which, view in enumerate((first, second)):
        for size, stride in zip(view.shape, view.strides, strict=True):
            if size == 1:
                continue
            pair = sizes.get(stride, (1, 1))
            if stride == 0 or pair[which] != 1:
                return None
            sizes[stride] = (pair[0], size) if which else (size, pair[1])
    sizes.setdefault(first.itemsize, (1, 1))
    return [(stride, *sizes[stride]) for stride in sorted(sizes, reverse=True)]
