"""What a fetch came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamer.artifacts.arriving import Part
from streamer.artifacts.metadata import Mode, PulledFolder
from streamer.checkpoint.partial import Partial
from streamer.report import Checksums

__all__ = ["Fetched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a fetch came to.

    Attributes:
        mode: what the folder holds, which may be more than was asked for.
        files, nbytes: in the folder.
        skipped: files that were there already.
        resumed_bytes: that were there already of files that were not.
        fetched_bytes: that were not.
        removed: files of an older version.
        checksums: with ``integrity=checksums``.
        partial: files of which only some ranks' bytes are there, and which ranks'.
    """

    url: str
    folder: Path
    mode: Mode
    files: int
    nbytes: int
    skipped: int
    resumed_bytes: int
    fetched_bytes: int
    removed: tuple[str, ...] = ()
    checksums: Checksums | None = None
    partial: Partial | None = None

    @classmethod
    def of(
        cls,
        marker: PulledFolder,
        parts: Sequence[Part],
        *,
        removed: tuple[str, ...] = (),
        checksums: Checksums | None = None,
    ) -> Fetched:
        """Sum up.

        Args:
            marker: of the folder, complete.
            parts: files that were not there.
        """
        missing = sum(part.missing_bytes for part in parts)
        return cls(
            url=marker.url,
            folder=marker.folder,
            mode=marker.mode,
            files=marker.files,
            nbytes=marker.nbytes,
            skipped=marker.files - len(parts),
            resumed_bytes=sum(part.needed_bytes for part in parts) - missing,
            fetched_bytes=missing,
            removed=removed,
            checksums=checksums,
            partial=marker.partial,
        )
