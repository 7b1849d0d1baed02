"""Describes a view as a window of the array it lies in: which rows, which columns."""

from __future__ import annotations

from collections.abc import Sequence

from streamer.plan.geometry import View

__all__ = ["Window", "window_of"]

#: Half-open index range per dimension of the enclosing array.
Window = tuple[tuple[int, int], ...]


def window_of(view: View, shape: Sequence[int], strides: Sequence[int], origin: int) -> Window | None:
    """Return where `view` lies in an array of `shape` that begins at byte `origin`.

    Args:
        view: the part, in bytes.
        shape, strides: of the whole, strides in bytes, descending.

    Returns:
        One range per dimension of the whole, or None when the view is no axis-aligned window of it.
    """
    sizes: dict[int, int] = {}
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 1:
            continue
        if stride == 0 or stride in sizes:
            return None
        sizes[stride] = size
    rest = view.offset - origin
    ranges = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            ranges.append((0, 1))
            continue
        start, rest = divmod(rest, stride)
        count = sizes.pop(stride, 1)
        if start + count > size:
            return None
        ranges.append((start, start + count))
    return tuple(ranges) if not sizes and rest == 0 else None
