"""Re-reads a sample of what was loaded and compares it with the parameters, byte for byte.

The sample takes another road than the load did: source positions come straight from the geometry of
each recorded copy, and bytes are read one range at a time, without the planner, the coalescing, the
staging buffers or in-place reception. What a load got wrong in any of those shows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from streamer.errors import VerificationError
from streamer.fetch.memory import byte_view
from streamer.report import Verified
from streamer.trace.copies import Completed
from streamer.trace.lazy import FileBase, LazyTensor, describe_base, view_of
from streamer.trace.pending import storage_key, storage_of
from streamer.trace.storages import named_tensors
from streamer.trace.tracer import Tracer
from streamer.trace.values import leaves_of

__all__ = ["Read", "verify_copies"]

#: Reads ``(file, start, end)`` ranges.
Read = Callable[[Sequence[tuple[int, int, int]]], list[bytes]]

_RUN = 64  # elements compared at each of three places of a copy
_MAX_COVERING_BYTES = 1 << 20
_MAX_COMPUTED_BYTES = 64 << 20


def verify_copies(tracer: Tracer, model: object, read: Read) -> Verified:
    """Compare the first, middle and last elements of every copy with its source, read anew.

    Copies whose destination was replaced since (by quantisation), or written to again (by the model's own
    code), hold something else on purpose; they are counted and left out, as are large computed ones.

    Raises:
        VerificationError: naming the first parameter that differs, the element and the source.
    """
    homes: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(model):
        homes.setdefault(storage_key(tensor), (name, tensor))
    copies = nbytes = replaced = overwritten = skipped = 0
    for copy in tracer.copies.completed:
        home = None if _is_gone(copy) else homes.get(copy.storage.cdata)
        if home is None:
            replaced += 1
        elif tracer.copies.writes.since(copy.storage.cdata, copy.window, copy.serial):
            overwritten += 1
        else:
            compared = _compare(copy, home[0], _alias(home[1], copy), tracer, read)
            copies += 1 if compared else 0
            skipped += 0 if compared else 1
            nbytes += compared
    return Verified(copies=copies, nbytes=nbytes, replaced=replaced, overwritten=overwritten, skipped=skipped)


def _is_gone(copy: Completed) -> bool:
    return bool(copy.storage.expired())  # type: ignore[no-untyped-call]


def _alias(tensor: torch.Tensor, copy: Completed) -> torch.Tensor:
    meta = copy.geometry
    alias = torch.empty(0, dtype=meta.dtype, device=tensor.device)
    return alias.set_(storage_of(tensor), meta.storage_offset(), meta.size(), meta.stride())


def _compare(copy: Completed, name: str, destination: torch.Tensor, tracer: Tracer, read: Read) -> int:
    """Compare samples; return how many bytes of the parameter were compared."""
    compared = 0
    for place in _places(tuple(destination.shape)):
        found = destination[place].reshape(-1)
        wanted = _source_values(copy.source, place, tracer, read)
        if wanted is None:
            continue
        wanted = wanted[: found.numel()]
        found = found[: wanted.numel()]
        wanted = wanted.to(found.device).to(found.dtype)
        different = (byte_view(wanted) != byte_view(found)).reshape(wanted.numel(), -1).any(-1)
        if bool(different.any()):
            first = int(different.nonzero()[0])
            index = [part.start if isinstance(part, slice) else part for part in place]
            if index:
                index[-1] += first
            raise VerificationError(
                f"{name} holds {found[first].item()} where element {index} of a copy from "
                f"{describe_base(copy.source.lazy_base)} should be {wanted[first].item()}",
                hint="load again with mode=eager, and report this with the model's name and the parallel layout",
            )
        compared += found.numel() * found.element_size()
    return compared


def _places(shape: tuple[int, ...]) -> Iterator[tuple[int | slice, ...]]:
    """Index a short run of elements at the beginning, in the middle and at the end."""
    if not shape:
        yield ()
        return
    seen = set()
    for number, divisor in ((0, 1), (1, 2), (1, 1)):
        index = tuple(min(size * number // divisor, size - 1) for size in shape[:-1])
        length = min(_RUN, shape[-1])
        start = (shape[-1] - length) * number // divisor
        if (index, start) not in seen:
            seen.add((index, start))
            yield (*index, slice(start, start + length))


def _source_values(
    source: LazyTensor, place: tuple[int | slice, ...], tracer: Tracer, read: Read
) -> torch.Tensor | None:
    part = source.lazy_meta[place]
    base = source.lazy_base
    if base.owned is not None or not isinstance(base, FileBase):
        if sum(view_of(leaf.lazy_meta).nbytes for leaf in leaves_of([source])) > _MAX_COMPUTED_BYTES:
            return None
        return tracer.values.evaluate([LazyTensor(base, part, source.device)])[0].reshape(-1)
    stride = part.stride()[0] if part.dim() else 1
    itemsize = part.element_size()
    start = base.info.start + int(part.storage_offset()) * itemsize
    count = part.numel()
    if count > 1 and (count - 1) * stride * itemsize > _MAX_COVERING_BYTES:
        count = 1
    (raw,) = read([(base.info.file, start, start + ((count - 1) * stride + 1) * itemsize)])
    typed = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    elements = torch.stack([typed[k * stride * itemsize :][:itemsize] for k in range(count)])
    return elements.view(part.dtype).reshape(-1)
