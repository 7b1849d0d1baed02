"""A source whose bytes are held against a manifest before anybody sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from streamer.checkpoint.manifest import (
    MANIFEST_KEY,
    MAX_MANIFEST_BYTES,
    FileDigests,
    Manifest,
    block_digest,
    parse_manifest,
)
from streamer.errors import CheckpointError, IntegrityError, ObjectNotFoundError
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.wrapper import SourceWrapper

__all__ = ["VerifiedSource"]


class VerifiedSource(SourceWrapper):
    """`source`, every read of whose weights is widened to whole blocks and checked.

    A read that does not match is made once more, for it may have been damaged on its way, and then fails. Hashing
    runs in threads beside the event loop.

    Args:
        source: closed with this one. It must hold a manifest.
        threads: that hash.
        are_wholes_checked: the reader holds files, of which the manifest has one digest, against that itself.
    """

    def __init__(self, source: Source, *, threads: int = 2, are_wholes_checked: bool = False) -> None:
        super().__init__(source)
        self._are_wholes_checked = are_wholes_checked
        self._manifest: Manifest | None = None
        self._reading = asyncio.Lock()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="s3stream-digest")

    async def list(self) -> Sequence[ObjectInfo]:
        items = await super().list()
        manifest = await self._read_manifest()
        for item in items:
            self._compare_size(manifest, item)
        return items

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        item = await super().stat(key, version)
        self._compare_size(await self._read_manifest(), item)
        return item

    def _compare_size(self, manifest: Manifest, item: ObjectInfo) -> None:
        known = manifest.files.get(item.key)
        if known is not None and known.size != item.size:
            raise IntegrityError(
                f"it has {item.size} bytes, and the manifest says {known.size}",
                url=self.label(item.key),
                hint="upload the files that the manifest was made of, or make it anew",
            )

    async def _read_manifest(self) -> Manifest:
        async with self._reading:
            if self._manifest is None:
                try:
                    item = await self._source.stat(MANIFEST_KEY)
                except ObjectNotFoundError as error:
                    raise CheckpointError(
                        f"{self.url} has no {MANIFEST_KEY}, and integrity=manifest asks for one",
                        hint="make one with `s3stream verify URL --write`",
                    ) from error
                if item.size > MAX_MANIFEST_BYTES:
                    raise CheckpointError(f"{self.label(MANIFEST_KEY)} has {item.size} bytes, which no manifest has")
                body = bytearray(item.size)
                await self._source.read_into(item, 0, [memoryview(body)])
                self._manifest = parse_manifest(bytes(body), self.label(MANIFEST_KEY))
            return self._manifest

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        manifest = await self._read_manifest()
        known = manifest.files.get(item.key)
        end = start + sum(map(len, buffers))
        if known is None:
            is_checked = self._are_wholes_checked and item.key in manifest.others
            if item.key.endswith(".safetensors") and not is_checked:
                raise IntegrityError(
                    "the manifest does not know this file",
                    url=self.label(item.key),
                    hint="make the manifest anew with `s3stream verify URL --write`",
                )
            await self._source.read_into(item, start, buffers)
            return
        if start == end:
            return
        low, high = known.covering(start, end, manifest.block_bytes)
        whole = [memoryview(bytearray(start - low)), *buffers, memoryview(bytearray(high - end))]
        loop = asyncio.get_running_loop()
        for last_chance in (False, True):
            await self._source.read_into(item, low, whole)
            checking = loop.run_in_executor(self._threads, _first_difference, known, manifest, low, whole)
            try:
                different = await asyncio.shield(checking)
            except asyncio.CancelledError:
                await asyncio.wait([checking])  # it reads the buffers
                raise
            if different is None:
                return
            if last_chance:
                name, first, stop = different
                raise IntegrityError(
                    f"the bytes of {name or 'the header'} are not those that the manifest was made of",
                    url=self.label(item.key),
                    start=first,
                    end=stop,
                    hint="upload the file again, or make the manifest anew if it was changed on purpose",
                )
            self.stats.retries += 1

    async def close(self) -> None:
        self._threads.shutdown(wait=True)
        await super().close()


def _first_difference(
    known: FileDigests, manifest: Manifest, low: int, buffers: Sequence[memoryview]
) -> tuple[str, int, int] | None:
    """Return name and range of the first block that is not as it should be."""
    high = low + sum(map(len, buffers))
    rest = iter(buffers)
    current = memoryview(b"")
    for stretch, number, start, end in known.blocks(low, high, manifest.block_bytes):
        missing, parts = end - start, []
        while missing:
            while not len(current):
                current = next(rest)
            parts.append(current[:missing])
            current = current[missing:]
            missing -= len(parts[-1])
        if block_digest(parts) != stretch.block(number):
            return stretch.name, start, end
    return None
