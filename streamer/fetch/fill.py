"""Fills tensors with bytes of files: plans the reads, lays out their segments, copies what was staged.

Where a request's bytes go is decided piece by piece. A contiguous piece of a contiguous CPU tensor of
the same dtype is received in place. Everything else (strided slices, dtype casts, tensors on a GPU,
crumbs) is staged and copied when the request is complete, by the thread that asked, which is the one
that owns the device's stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from streamer.errors import CheckpointError
from streamer.fetch.memory import byte_view, bytes_of, same_size_integer
from streamer.fetch.stream import Arrival, Direct, Discard, Read, Segment, Staged
from streamer.plan.geometry import View, boxes_between, element_offset, sort_dims
from streamer.plan.plan import Demand, Piece, Request
from streamer.sources.base import ObjectInfo, Source

__all__ = ["CopyJob", "Layout", "ReadFrom", "copy_arrival", "demand_of", "lay_out", "whole_offset"]

#: A shorter piece costs more in system calls of its own than in a copy out of the staging buffer.
_LEAST_DIRECT_BYTES = 16 << 10
#: Gaps up to this long between staged pieces are staged with them.
_LEAST_DISCARD_BYTES = 64 << 10
_ALIGNMENT = 64


#: Finds the source and the object of a file, by its number.
ReadFrom = Callable[[int], tuple[Source, ObjectInfo]]


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One tensor to fill.

    Attributes:
        destination: where the values go; any device, any strides.
        file: which file of the checkpoint.
        view: the elements to read, in absolute file positions, of the destination's shape.
        origin: where the source tensor begins in the file.
        dtype: of the source; it is converted to the destination's.
    """

    destination: torch.Tensor
    file: int
    view: View
    origin: int
    dtype: torch.dtype


@dataclass(slots=True)
class _Target:
    """A job in address order: `tensor` is the destination with its dimensions permuted likewise."""

    job: CopyJob
    view: View
    tensor: torch.Tensor
    memory: memoryview | None  # set when bytes may be received in place


@dataclass(slots=True)
class _Copy:
    piece: Piece
    offset: int  # of the first byte of the covering segment in the staging buffer
    start: int  # file position of that byte


@dataclass(slots=True)
class Layout:
    """The reads of one plan, tagged with the numbers of their requests, and what must be copied after each."""

    reads: list[Read]
    targets: list[_Target]
    copies: dict[int, list[_Copy]] = field(default_factory=dict)
    direct_bytes: int = 0


def demand_of(job: CopyJob) -> Demand:
    """Return what `job` needs, in address order.

    Raises:
        ValueError: its elements overlap or interleave; the caller must stage the covering range.
    """
    return Demand(job.file, sort_dims(job.view)[0], job.origin)


def lay_out(
    jobs: Sequence[CopyJob],
    requests: Mapping[int, Request],
    read_from: ReadFrom,
    *,
    whole: Collection[int] = (),
    not_ours: Collection[int] = (),
) -> Layout:
    """Decide, for each request, which bytes are received in place and which are staged.

    Args:
        requests: by number.
        whole: numbers of the requests that are staged as they are, so that others can find their bytes too.
        not_ours: numbers of the requests that somebody else makes.
    """
    layout = Layout([], [_target(job) for job in jobs])
    for number, request in requests.items():
        if number in whole:
            first = whole_offset(request.start)
            segments: list[Segment] = [Staged(first, request.nbytes)]
            copies, staged = [_Copy(piece, first, request.start) for piece in request.pieces], first + request.nbytes
        else:
            segments, copies, staged = _segments(request, layout)
        if number not in not_ours:
            layout.reads.append(Read(*read_from(request.file), request.start, segments, staged, number))
        layout.copies[number] = copies
    return layout


def whole_offset(start: int) -> int:
    """Return where a read from `start` begins in its buffer, if it is staged as it is.

    Elements are then aligned as they are in the file, where they usually are.
    """
    return start % _ALIGNMENT


def _target(job: CopyJob) -> _Target:
    view, order = sort_dims(job.view)
    tensor = job.destination.permute(order)
    memory = None
    if (
        tensor.device.type == "cpu"
        and tensor.dtype == job.dtype
        and view.is_dense
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    ):
        memory = bytes_of(tensor)
    return _Target(job, view, tensor, memory)


@dataclass(slots=True)
class _Extent:
    """Pieces that share bytes, or one piece alone."""

    start: int
    end: int
    pieces: list[Piece]


def _extents(request: Request, targets: Sequence[_Target]) -> Iterator[_Extent]:
    spans = []
    for piece in request.pieces:
        view = targets[piece.demand].view
        end = element_offset(view, piece.last - 1) + view.itemsize
        spans.append((element_offset(view, piece.first), end, piece))
    spans.sort(key=lambda span: span[:2])
    current: _Extent | None = None
    for start, end, piece in spans:
        if current is not None and start < current.end:
            current.end = max(current.end, end)
            current.pieces.append(piece)
            continue
        if current is not None:
            yield current
        current = _Extent(start, end, [piece])
    if current is not None:
        yield current


def _segments(request: Request, layout: Layout) -> tuple[list[Segment], list[_Copy], int]:
    segments: list[Segment] = []
    copies: list[_Copy] = []
    staged = 0  # bytes of the staging buffer laid out so far
    position = request.start
    open_at: int | None = None  # file position at which the last segment, a staged one, began
    for extent in _extents(request, layout.targets):
        gap = extent.start - position
        direct = _direct(extent, layout.targets)
        if gap and open_at is not None and direct is None and gap < _LEAST_DISCARD_BYTES:
            segments.append(Staged(staged, gap))
            staged += gap
        elif gap:
            segments.append(Discard(gap))
            open_at = None
        if direct is not None:
            segments.append(Direct(direct))
            layout.direct_bytes += len(direct)
            open_at = None
        else:
            if open_at is None:
                # Elements must be aligned in the buffer, whatever their alignment in the file.
                origin = layout.targets[extent.pieces[0].demand].job.origin
                staged += -staged % _ALIGNMENT + (extent.start - origin) % 16
                open_at = extent.start
            length = extent.end - extent.start
            copies.extend(_Copy(piece, staged, extent.start) for piece in extent.pieces)
            segments.append(Staged(staged, length))
            staged += length
        position = extent.end
    return _joined(segments), copies, staged


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if isinstance(last, Staged) and isinstance(segment, Staged) and last.offset + last.nbytes == segment.offset:
            joined[-1] = Staged(last.offset, last.nbytes + segment.nbytes)
        else:
            joined.append(segment)
    return joined


def _direct(extent: _Extent, targets: Sequence[_Target]) -> memoryview | None:
    if len(extent.pieces) != 1 or extent.end - extent.start < _LEAST_DIRECT_BYTES:
        return None
    piece = extent.pieces[0]
    target = targets[piece.demand]
    if target.memory is None:
        return None
    return target.memory[piece.first * target.view.itemsize : piece.last * target.view.itemsize]


def copy_arrival(arrival: Arrival, layout: Layout) -> float:
    """Copy what `arrival` staged to its destinations; return the seconds it took.

    The caller releases the arrival afterwards; copies to a GPU are complete by then.
    """
    copies = layout.copies[arrival.tag]
    if not copies:
        return 0.0
    assert arrival.buffer is not None
    began = time.perf_counter()
    devices = set()
    with torch.no_grad():
        for copy in copies:
            target = layout.targets[copy.piece.demand]
            _copy_piece(copy, target, arrival.buffer.tensor)
            if target.tensor.device.type == "cuda":
                devices.add(target.tensor.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - began


def _copy_piece(copy: _Copy, target: _Target, staging: torch.Tensor) -> None:
    view, piece = target.view, copy.piece
    start = copy.offset + element_offset(view, piece.first) - copy.start
    end = copy.offset + element_offset(view, piece.last - 1) + view.itemsize - copy.start
    typed = _reinterpret(staging[start:end], target.job.dtype)
    destination = target.tensor
    if destination.dtype == target.job.dtype:
        integer = same_size_integer(view.itemsize)
        if integer is not None:
            typed, destination = typed.view(integer), byte_view(destination)
    strides = [stride // view.itemsize for stride in view.strides]
    first = element_offset(view, piece.first)
    for box in boxes_between(view.shape, piece.first, piece.last):
        offset = view.offset + sum(low * stride for (low, _), stride in zip(box, view.strides, strict=True)) - first
        source = typed.as_strided(
            [high - low for low, high in box], strides, typed.storage_offset() + offset // view.itemsize
        )
        destination[tuple(slice(low, high) for low, high in box)].copy_(source, non_blocking=True)


def _reinterpret(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    itemsize = torch.empty(0, dtype=dtype).element_size()
    if raw.storage_offset() % itemsize:
        raw = raw.clone()  # a file whose tensors are not aligned to their elements
    if raw.numel() % itemsize:
        raise CheckpointError(f"{raw.numel()} bytes do not hold whole elements of {dtype}")
    return raw.view(dtype)
