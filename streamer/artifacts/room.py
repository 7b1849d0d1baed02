"""Whether a volume has room, before a byte is written to it."""

from __future__ import annotations

from collections.abc import Sequence

from streamer.artifacts.arriving import Part
from streamer.artifacts.destination import Destination
from streamer.errors import NoSpaceError

__all__ = ["require_room"]

#: The journal, and the marker before and after its rename.
_OWN_FILES = 3
_OWN_BYTES = 64 << 10


def require_room(destination: Destination, parts: Sequence[Part], url: str, outdated_bytes: int) -> None:
    """See that everything that is missing fits, beside what has arrived.

    Quotas, and the limits of Kubernetes' emptyDir, are seen by nobody before they are reached.

    Args:
        outdated_bytes: on disk, of files that will be removed first.

    Raises:
        NoSpaceError: it does not.
    """
    if not parts:
        return
    room = destination.room()
    block = room.block_bytes
    needed = _OWN_BYTES + sum(part.missing_on_disk(block) for part in parts)
    if needed > room.nbytes + outdated_bytes:
        also = f" and {outdated_bytes} in files of an older version" if outdated_bytes else ""
        raise NoSpaceError(
            f"{destination.path} has {room.nbytes} bytes free{also}, and {needed} more are needed "
            f"for {len(parts)} files of {url}",
            hint="make room or take a larger volume; nothing was fetched",
        )
    folders = {part.item.key.rpartition("/")[0] for part in parts} - {""}
    inodes = _OWN_FILES + sum(part.is_new for part in parts) + sum(len(folder.split("/")) for folder in folders)
    if room.inodes is not None and inodes > room.inodes:
        raise NoSpaceError(
            f"{destination.path} has {room.inodes} inodes free, and {inodes} are needed "
            f"for {len(parts)} files of {url}",
            hint="remove files or take a volume with more inodes; nothing was fetched",
        )
