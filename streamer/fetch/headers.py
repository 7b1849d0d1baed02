"""Reads a checkpoint's listing, index and headers: everything that is known before any weight byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from streamer.checkpoint.checkpoint import Checkpoint, assemble
from streamer.checkpoint.header import FileHeader, HeaderParser
from streamer.checkpoint.index import MAX_INDEX_BYTES, Index, parse_index
from streamer.checkpoint.select import Listed, Selection, choose_index, select_files
from streamer.checkpoint.stored import StoredChecksum
from streamer.config import StreamConfig
from streamer.errors import CheckpointError
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.partial import leading_bytes
from streamer.sources.tasks import FlatTaskGroup

__all__ = ["OpenedCheckpoint", "read_checkpoint", "read_index", "read_object"]


class OpenedCheckpoint:
    """A checkpoint and the pinned objects its files are read from, in the order of `checkpoint.files`.

    Attributes:
        stored: the objects' stored checksums, by key, if the store was asked for them.
    """

    def __init__(self, checkpoint: Checkpoint, items: Sequence[ObjectInfo]) -> None:
        self.checkpoint = checkpoint
        self.items = tuple(items)
        self.stored: Mapping[str, StoredChecksum] = {}


async def read_object(source: Source, item: ObjectInfo, *, limit_bytes: int) -> bytes:
    """Read a small object whole.

    Raises:
        CheckpointError: it is larger than `limit_bytes`, checked before anything is allocated.
        SourceError: see `streamer.errors`.
    """
    if item.size > limit_bytes:
        raise CheckpointError(f"{source.label(item.key)} has {item.size} bytes; at most {limit_bytes} were expected")
    body = bytearray(item.size)
    if item.size:
        await source.read_into(item, 0, [memoryview(body)])
    return bytes(body)


async def read_checkpoint(
    source: Source,
    config: StreamConfig,
    *,
    only: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> OpenedCheckpoint:
    """List `source`, choose its weights and read all their headers at once.

    Args:
        only: keys of the files to load, instead of choosing them.
        progress: called with headers read and headers to read.

    Raises:
        CheckpointError, SourceError: before any byte of a weight is read.
    """
    items = {item.key: item for item in await (_stat_all(source, only, config.concurrency) if only else source.list())}
    listing = [Listed(item.key, item.size) for item in items.values()]
    index = None if only else await read_index(source, config, items, listing)
    if only:
        selection = Selection(weights=tuple(listing), skipped=(), metadata=())
    else:
        selection = select_files(source.url, listing, index)
    gate = asyncio.Semaphore(config.concurrency)

    finished = 0

    async def read_header(listed: Listed) -> FileHeader:
        nonlocal finished
        async with gate:
            header = await _read_header(source, items[listed.key], config.header_read_bytes)
        finished += 1
        if progress is not None:
            progress(finished, len(selection.weights))
        return header

    async with FlatTaskGroup() as group:
        tasks = [group.create_task(read_header(listed)) for listed in selection.weights]
    checkpoint = assemble(
        source.url,
        selection.weights,
        [task.result() for task in tasks],
        index=index,
        skipped=selection.skipped,
        metadata_files=selection.metadata,
    )
    return OpenedCheckpoint(checkpoint, [items[listed.key] for listed in selection.weights])


async def _stat_all(source: Source, keys: Sequence[str], concurrency: int) -> Sequence[ObjectInfo]:
    gate = asyncio.Semaphore(concurrency)

    async def stat(key: str) -> ObjectInfo:
        async with gate:
            return await source.stat(key)

    async with FlatTaskGroup() as group:
        tasks = [group.create_task(stat(key)) for key in keys]
    return [task.result() for task in tasks]


async def read_index(
    source: Source, config: StreamConfig, items: Mapping[str, ObjectInfo], listing: Sequence[Listed]
) -> Index | None:
    """Read the index to obey; None when there is none, or with ``index=ignore``.

    Args:
        items: what was listed, by key.
        listing: the same.

    Raises:
        CheckpointError, SourceError: see `streamer.errors`.
    """
    if config.index == "ignore":
        return None
    key = choose_index(listing)
    if key is None:
        return None
    return parse_index(key, await read_object(source, items[key], limit_bytes=MAX_INDEX_BYTES), source.label(key))


async def _read_header(source: Source, item: ObjectInfo, first_read_bytes: int) -> FileHeader:
    """One speculative read holds most headers whole; a longer one costs exactly one more."""
    parser = HeaderParser(source.label(item.key), item.size)
    position = 0
    count = min(first_read_bytes, leading_bytes(source, item))
    while count:
        buffer = bytearray(count)
        await source.read_into(item, position, [memoryview(buffer)])
        parser.feed(buffer)
        position += count
        count = parser.missing
    return parser.finish()
