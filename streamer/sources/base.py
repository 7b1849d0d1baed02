"""The seam between the library and wherever checkpoints are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from streamer.checkpoint.stored import StoredChecksum
from streamer.transport.stats import TransferStats

__all__ = ["KeepsChecksums", "Listing", "ListsFolders", "ObjectInfo", "Source"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object, as it was when it was listed.

    Attributes:
        key: relative to the source's root.
        size: bytes.
        pin: identifies the content; a read of other content fails. An ETag, or what stands in for one.
        version: reads are of this version, whatever has replaced it since; None where there are none to ask for.
    """

    key: str
    size: int
    pin: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """What is below a prefix.

    Attributes:
        items: objects; directory markers are left out.
        folders: when the listing stops at slashes, what is behind the first of them, each with a slash at its end.
    """

    items: Sequence[ObjectInfo]
    folders: Sequence[str] = ()


class Source(Protocol):
    """A tree of objects below one root. Siblings, never aware of each other; wrappers are sources too.

    All methods belong to one event loop, the one that first awaits one of them.
    """

    @property
    def url(self) -> str:
        """The root, for messages. Never holds a secret."""

    @property
    def stats(self) -> TransferStats:
        """What this source has done so far."""

    async def list(self) -> Sequence[ObjectInfo]:
        """Return every object below the root, at any depth, directory markers left out.

        Raises:
            ObjectNotFoundError: the bucket, folder or prefix does not exist or is empty.
            SourceError: see `streamer.errors`.
        """

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        """Return one object.

        Args:
            version: this one of it, instead of the latest. Only sources whose items have versions are asked for any.

        Raises:
            ObjectNotFoundError: there is none.
            SourceError: see `streamer.errors`.
        """

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the object's bytes from `start` on.

        When this has returned, raised or been cancelled, the buffers are not touched any more.

        Args:
            item: from `list` or `stat`; its pin is enforced.
            start: first byte; ``start + sum(len(buffer))`` must not pass the end.

        Raises:
            ObjectChangedError: the content is not the pinned one any more.
            SourceError: see `streamer.errors`.
        """

    async def close(self) -> None:
        """Release connections and files. Idempotent."""

    def label(self, key: str) -> str:
        """Return how to name `key` in messages."""


@runtime_checkable
class ListsFolders(Protocol):
    """What sources of stores offer besides."""

    async def list_below(self, prefix: str, *, recursive: bool) -> Listing:
        """Return what is below `prefix`, which is relative to the root and ends in a slash if it is not empty.

        Args:
            recursive: whether to go into folders, instead of naming them.

        Raises:
            SourceError: see `streamer.errors`. That nothing is there is no error.
        """


@runtime_checkable
class KeepsChecksums(Protocol):
    """What a source may offer besides: the checksums that its store keeps. Most stores keep none."""

    async def stored_checksum(self, item: ObjectInfo) -> StoredChecksum:
        """Return what the store has kept of `item` since its upload; costs requests.

        Raises:
            ObjectChangedError: the content is not the pinned one any more.
            SourceError: see `streamer.errors`.
        """
