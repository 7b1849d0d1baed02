"""What sources that wrap another have in common."""

from __future__ import annotations

from collections.abc import Sequence

from streamer.checkpoint.stored import StoredChecksum
from streamer.sources.base import KeepsChecksums, ObjectInfo, Source
from streamer.transport.stats import TransferStats

__all__ = ["SourceWrapper"]


class SourceWrapper:
    """Passes everything on to `source`, with which it is closed; subclasses change what they are about."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def inner(self) -> Source:
        """What is wrapped."""
        return self._source

    @property
    def url(self) -> str:
        return self._source.url

    @property
    def stats(self) -> TransferStats:
        return self._source.stats

    def label(self, key: str) -> str:
        return self._source.label(key)

    async def list(self) -> Sequence[ObjectInfo]:
        return await self._source.list()

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        return await self._source.stat(key, version)

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        await self._source.read_into(item, start, buffers)

    async def stored_checksum(self, item: ObjectInfo) -> StoredChecksum:
        if isinstance(self._source, KeepsChecksums):
            return await self._source.stored_checksum(item)
        return StoredChecksum(None, why_not="such a source keeps no checksums")

    async def close(self) -> None:
        await self._source.close()
