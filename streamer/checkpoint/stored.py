"""The checksum that a store keeps of a file since its upload."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StoredChecksum", "StoredPart"]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A range, half open, and its digest: big-endian bytes for a CRC."""

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StoredChecksum:
    """What is known of one file.

    Attributes:
        algorithm: as S3 writes it, such as ``CRC64NVME``; None when the store keeps none.
        parts: a single one when the checksum is of the whole file, else those it was uploaded in, in order. None of
            them can be checked when this is empty.
        of_parts: what the store calls the file's composite checksum: that of the parts' digests, joined.
        why_not: why there are no parts to check.
    """

    algorithm: str | None
    parts: tuple[StoredPart, ...] = ()
    of_parts: bytes | None = None
    why_not: str = ""
