"""Whether what has arrived on disk is what was published, before it gets its name."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from streamer.artifacts.arriving import Arriving, Part
from streamer.checkpoint.manifest import MANIFEST_KEY, MAX_MANIFEST_BYTES, Manifest, parse_manifest
from streamer.checkpoint.stored import StoredChecksum
from streamer.config import StreamConfig
from streamer.errors import IntegrityError
from streamer.fetch.headers import read_object
from streamer.report import Checksums
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.checksummed import ChecksummedSource
from streamer.sources.tasks import FlatTaskGroup
from streamer.sources.verified import VerifiedSource
from streamer.sources.wrapper import SourceWrapper

__all__ = ["IntegrityCheck"]

_CHUNK_BYTES = 8 << 20


class _OnDisk(SourceWrapper):
    """`source`, with the bytes that have arrived in the place of its own."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.parts: dict[ObjectInfo, tuple[Part, Arriving]] = {}

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        part, arriving = self.parts[item]
        await arriving.in_thread(part.read, start, buffers)


class IntegrityCheck:
    """What ``integrity`` asks for, of files that arrive on disk.

    With ``manifest``, weights are checked range by range as they arrive, by `source`; files that are not weights are
    checked here. With ``checksums``, files are read again from disk, in order, and so are the bytes that an earlier
    process fetched.

    Attributes:
        source: through which to read.
    """

    def __init__(self, source: Source, config: StreamConfig) -> None:
        self.source = VerifiedSource(source, are_wholes_checked=True) if config.integrity == "manifest" else source
        self._config = config
        self._manifest: Manifest | None = None
        self._on_disk = _OnDisk(source)
        self._checksummed: ChecksummedSource | None = None
        self._stored: dict[str, StoredChecksum] = {}

    async def prepare(self, items: Sequence[ObjectInfo]) -> None:
        """Learn what there is to hold the files against.

        Args:
            items: that will be fetched.

        Raises:
            CheckpointError, MissingDependencyError: there is nothing that could be checked.
            SourceError: see `streamer.errors`.
        """
        weights = [item for item in items if item.key.endswith(".safetensors")]
        if self._config.integrity == "checksums" and weights:
            gate = asyncio.Semaphore(self._config.concurrency)

            async def ask(item: ObjectInfo) -> None:
                async with gate:
                    self._stored[item.key] = await self._on_disk.stored_checksum(item)

            async with FlatTaskGroup() as group:
                for item in weights:
                    group.create_task(ask(item))
            self._checksummed = ChecksummedSource(self._on_disk, longest_read_bytes=_CHUNK_BYTES, in_order=True)
            self._checksummed.adopt(weights, self._stored)
            self._checksummed.expect((), weights)
        await self.manifest()

    async def manifest(self) -> Manifest | None:
        """Return the manifest that ``integrity=manifest`` holds files against; None with another.

        Raises:
            CheckpointError, SourceError: see `streamer.errors`.
        """
        if self._manifest is None and self._config.integrity == "manifest":
            item = await self.source.stat(MANIFEST_KEY)
            body = await read_object(self.source, item, limit_bytes=MAX_MANIFEST_BYTES)
            self._manifest = parse_manifest(body, self.source.label(MANIFEST_KEY))
        return self._manifest

    async def check(self, part: Part, arriving: Arriving) -> None:
        """Check a file, all of which is on disk; what is wrong is removed.

        Raises:
            IntegrityError: it is not what was published.
        """
        try:
            if self._manifest is not None:
                await self._check_digest(part, arriving, self._manifest)
            stored = self._stored.get(part.item.key)
            if self._checksummed is not None and stored is not None and stored.algorithm and not stored.why_not:
                self._on_disk.parts[part.item] = part, arriving
                await self._read_all(part.item, self._checksummed)
        except IntegrityError:
            await arriving.in_thread(part.discard)
            raise

    @staticmethod
    async def _read_all(item: ObjectInfo, source: Source) -> None:
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, item.size)))
        for start in range(0, item.size, _CHUNK_BYTES):
            await source.read_into(item, start, [buffer[: min(_CHUNK_BYTES, item.size - start)]])

    async def settle(self) -> Checksums | None:
        """Sum up what was held against stored checksums; None if that was not asked for, or there were no weights."""
        return await self._checksummed.settle() if self._checksummed is not None else None

    async def close(self) -> None:
        """Close the source too."""
        await (self._checksummed or self.source).close()

    async def _check_digest(self, part: Part, arriving: Arriving, manifest: Manifest) -> None:
        expected = manifest.others.get(part.item.key)
        if expected is None:
            return
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, part.item.size)))
        for start in range(0, part.item.size, _CHUNK_BYTES):
            view = buffer[: min(_CHUNK_BYTES, part.item.size - start)]
            await arriving.in_thread(part.read, start, [view])
            await arriving.in_thread(digest.update, view)
        if digest.hexdigest() != expected:
            raise IntegrityError(
                "the bytes are not those that the manifest was made of",
                url=self.source.label(part.item.key),
                hint="upload the file again, or make the manifest anew if it was changed on purpose",
            )
