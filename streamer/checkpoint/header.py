"""Parser for the header of a safetensors file: bytes in, validated tensor entries out, no I/O.

A file is an 8-byte little-endian length N, N bytes of JSON, then the tensors' data back to back
(https://huggingface.co/docs/safetensors, "Format"). What is accepted is decided by the reference
implementation rather than by the prose: safetensors 0.8 (``tensor.rs``, ``read_metadata`` and
``validate``) takes leading white space that the prose forbids, and the tests compare the two on
generated headers. Its JSON comes from serde, which is stricter than Python's: see `strict_json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamer.checkpoint.dtypes import DTYPE_BITS
from streamer.checkpoint.sniff import name_foreign_body
from streamer.checkpoint.strict_json import JsonObject, StrictJsonError, loads
from streamer.errors import HeaderError

__all__ = ["LENGTH_BYTES", "MAX_HEADER_BYTES", "FileHeader", "HeaderParser", "HeaderTensor"]

LENGTH_BYTES = 8
#: safetensors refuses longer headers, so that a lying length cannot make a reader allocate.
MAX_HEADER_BYTES = 100_000_000

_MAX_USIZE = (1 << 64) - 1
_FIELDS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor of a file; offsets are absolute positions in the file, half open."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A validated header. `tensors` are in the order of their data."""

    tensors: tuple[HeaderTensor, ...]
    metadata: Mapping[str, str]
    data_start: int


class HeaderParser:
    """Takes the beginning of a file in pieces of any size and yields its header.

    Feed it bytes until `missing` is 0, then call `finish`. Bytes behind the header are ignored, so the
    first read may be larger than the header.

    Args:
        label: how to name the file in errors.
        file_bytes: size of the whole file, against which lengths are checked before anything is kept.

    Raises (from every method):
        HeaderError: the file cannot be a safetensors file. The parser is then unusable.
    """

    def __init__(self, label: str, file_bytes: int) -> None:
        self._label = label
        self._file_bytes = file_bytes
        self._received = bytearray()
        self._wanted = LENGTH_BYTES
        self._length_known = False
        if file_bytes < LENGTH_BYTES:
            raise HeaderError(
                f"{label} has {file_bytes} bytes, too few for a safetensors file",
                hint="the upload may be incomplete; upload the file again",
            )

    @property
    def missing(self) -> int:
        """How many bytes are needed before the next step; 0 when the header is complete."""
        return self._wanted - len(self._received)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the file."""
        view = memoryview(data)
        while len(view) and self.missing:
            taken = view[: self.missing]
            self._received += taken
            view = view[len(taken) :]
            if not self._length_known and not self.missing:
                self._accept_length(peek=bytes(view[:512]))

    def _accept_length(self, peek: bytes) -> None:
        length = int.from_bytes(self._received[:LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES or length + LENGTH_BYTES > self._file_bytes:
            foreign = name_foreign_body(bytes(self._received) + peek)
            if foreign:
                raise HeaderError(
                    f"{self._label} is {foreign} ({self._file_bytes} bytes), not a safetensors file",
                    hint="upload the real file",
                )
            raise HeaderError(
                f"{self._label} announces a header of {length} bytes in a file of {self._file_bytes}; "
                f"safetensors allows at most {MAX_HEADER_BYTES}",
                hint="the file is truncated or not a safetensors file",
            )
        self._wanted = LENGTH_BYTES + length
        self._length_known = True

    def finish(self) -> FileHeader:
        """Parse and validate the complete header.

        Raises:
            HeaderError: bytes are still missing, or the header breaks a rule.
        """
        if self.missing or not self._length_known:
            raise HeaderError(f"{self._label} ended inside its header, {self.missing} bytes early")
        return _parse(self._label, bytes(self._received[LENGTH_BYTES:]), self._file_bytes)


def _parse(label: str, raw: bytes, file_bytes: int) -> FileHeader:
    try:
        document = loads(raw)
        if not isinstance(document, JsonObject):
            raise StrictJsonError("the header is not a JSON object")
        metadata: Mapping[str, str] = {}
        seen_metadata = False
        entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for name, value in document.pairs:
            if name == "__metadata__":
                if seen_metadata:
                    raise StrictJsonError("__metadata__ appears twice")
                seen_metadata = True
                metadata = _metadata(value)
            else:
                # As in the reference, the last of several equal names counts, but all must be well formed.
                entries[name] = _entry(name, value)
    except StrictJsonError as error:
        raise HeaderError(f"{label} has an invalid header: {error}") from error
    data_start = LENGTH_BYTES + len(raw)
    tensors = _lay_out(label, entries, data_start, file_bytes)
    return FileHeader(tensors=tensors, metadata=metadata, data_start=data_start)


def _metadata(value: Any) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, JsonObject):
        raise StrictJsonError("__metadata__ is not an object")
    for key, text in value.pairs:
        if not isinstance(text, str):
            raise StrictJsonError(f"__metadata__ entry {key!r} is not a string")
    return dict(value.pairs)


def _entry(name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape and data-relative offsets of one entry, or refuse it."""
    if isinstance(value, JsonObject):
        fields: dict[str, Any] = {}
        for key, item in value.pairs:
            if key in _FIELDS:
                if key in fields:
                    raise StrictJsonError(f"tensor {name!r} gives {key} twice")
                fields[key] = item
        absent = [key for key in _FIELDS if key not in fields]
        if absent:
            raise StrictJsonError(f"tensor {name!r} has no {absent[0]}")
        dtype, shape, offsets = (fields[key] for key in _FIELDS)
    elif isinstance(value, list) and len(value) == len(_FIELDS):
        dtype, shape, offsets = value
    else:
        raise StrictJsonError(f"tensor {name!r} is not described by an object")
    if isinstance(dtype, JsonObject) and len(dtype.pairs) == 1 and dtype.pairs[0][1] is None:
        dtype = dtype.pairs[0][0]  # serde reads a unit variant in either spelling
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        shown = dtype if isinstance(dtype, str) else type(dtype).__name__
        raise StrictJsonError(f"tensor {name!r} has an unknown dtype {shown!r}")
    if not isinstance(shape, list) or not all(_is_usize(size) for size in shape):
        raise StrictJsonError(f"tensor {name!r} has a shape that is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_usize(offset) for offset in offsets):
        raise StrictJsonError(f"tensor {name!r} has data_offsets that are not a pair of positions")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _is_usize(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_USIZE


def _lay_out(
    label: str,
    entries: Mapping[str, tuple[str, tuple[int, ...], int, int]],
    data_start: int,
    file_bytes: int,
) -> tuple[HeaderTensor, ...]:
    """Check that the tensors cover the data exactly, and make their offsets absolute."""
    ordered = sorted(entries.items(), key=lambda item: item[1][2:])
    tensors = []
    position, previous = 0, None
    for name, (dtype, shape, start, end) in ordered:
        if start != position or end < start:
            raise HeaderError(_layout_problem(label, name, start, end, position, previous))
        nbytes = _nbytes(label, name, dtype, shape)
        if nbytes != end - start:
            raise HeaderError(
                f"{label}: tensor {name!r} of shape {list(shape)} and dtype {dtype} needs {nbytes} bytes, "
                f"but its data_offsets span {end - start}"
            )
        tensors.append(HeaderTensor(name, dtype, shape, data_start + start, data_start + end))
        position, previous = end, name
    if data_start + position != file_bytes:
        found = file_bytes - data_start
        state = "truncated" if found < position else "followed by bytes that no tensor owns"
        raise HeaderError(
            f"{label} is {state}: its tensors take {position} bytes, the file holds {found} after the header",
            hint="upload the file again",
        )
    return tuple(tensors)


def _layout_problem(label: str, name: str, start: int, end: int, position: int, previous: str | None) -> str:
    if end < start:
        return f"{label}: tensor {name!r} ends at {end}, before it begins at {start}"
    if start < position:
        return f"{label}: tensors {previous!r} and {name!r} overlap"
    return f"{label}: {start - position} bytes before tensor {name!r} belong to no tensor"


def _nbytes(label: str, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    bits = 1
    # In this order and with these limits, as the reference does in 64-bit arithmetic.
    for size in (*shape, DTYPE_BITS[dtype]):
        bits *= size
        if bits > _MAX_USIZE:
            raise HeaderError(f"{label}: the size of tensor {name!r} overflows 64 bits")
    if bits % 8:
        raise HeaderError(f"{label}: tensor {name!r} of packed dtype {dtype} does not fill whole bytes")
    return bits // 8
