"""``s3stream://bucket/key`` and ``s3stream+gs://bucket/key`` for fsspec: S3 and GCS by our reader, read-only.

fsspec finds these by the entry point ``fsspec.specs``; nothing else imports this module, so fsspec is needed only where
it is used. Every read has what a load's reads have: ranges of `request_bytes` at once, checks, retries, resuming.

What is read is pinned for as long as it must be of one piece: an open file to the object that it was opened as, the
ranges of one call to those that the call began with. Between calls nothing is remembered, so that a filesystem, which
fsspec keeps for the life of the process, never gives what is not there any more.
"""

from __future__ import annotations

import asyncio
import io
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from fsspec.asyn import AsyncFileSystem, sync
from fsspec.spec import AbstractBufferedFile

from streamer.config import StreamConfig
from streamer.errors import ObjectNotFoundError, SourceError
from streamer.sources.base import Listing, ListsFolders, ObjectInfo, Source
from streamer.sources.gcs_url import parse_gcs_url
from streamer.sources.open import open_source
from streamer.sources.s3_url import parse_s3_url
from streamer.sources.tasks import FlatTaskGroup

__all__ = ["GcsStreamFileSystem", "S3StreamFileSystem"]

_CLOSE_SECONDS = 5.0


class S3StreamFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """Objects of S3, and of stores that speak its protocol.

    Args:
        asynchronous, loop, batch_size: as for every asynchronous filesystem of fsspec.
        options: those of `StreamConfig`, as ``storage_options``; the environment's hold too.

    Raises:
        ConfigError: an option is wrong or unknown.
        FileNotFoundError, PermissionError, OSError: from every method; they are `SourceError`, which says more.
    """

    protocol: str | tuple[str, ...] = "s3stream"
    _store = "s3"

    def __init__(
        self, *, asynchronous: bool = False, loop: Any = None, batch_size: int | None = None, **options: Any
    ) -> None:
        for_fsspec = ("skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths")
        own = {name: options.pop(name) for name in for_fsspec if name in options}
        self._config = StreamConfig.resolve(options)
        super().__init__(asynchronous=asynchronous, loop=loop, batch_size=batch_size, **own)
        self._sources: dict[str, Source] = {}
        weakref.finalize(self, _close_all, self._sources, self._loop, os.getpid())

    # -- paths ---------------------------------------------------------------------------------------

    def _split(self, path: str) -> tuple[Source, str]:
        """Return the source of the bucket that `path` begins with, and the key."""
        path = self._strip_protocol(path)
        location = parse_s3_url(f"s3://{path}") if self._store == "s3" else parse_gcs_url(f"gs://{path}")
        if location.bucket not in self._sources:
            self._sources[location.bucket] = open_source(f"{self._store}://{location.bucket}", self._config)
        return self._sources[location.bucket], location.prefix.rstrip("/")

    async def _stat(self, path: str) -> tuple[Source, ObjectInfo]:
        source, key = self._split(path)
        if not key:
            raise IsADirectoryError(f"{source.url} is a bucket, not an object")
        return source, await source.stat(key)

    # -- looking -------------------------------------------------------------------------------------

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        source, key = self._split(path)
        missing: ObjectNotFoundError | None = None
        if key:
            try:
                return self._entry(path, await source.stat(key))
            except ObjectNotFoundError as error:
                missing = error
        found = await self._list(source, f"{key}/" if key else "", recursive=False)
        if key and not found.items and not found.folders:
            assert missing is not None
            raise missing
        return self._folder(self._strip_protocol(path))

    def _entry(self, path: str, item: ObjectInfo) -> dict[str, Any]:
        entry = {"name": self._strip_protocol(path), "size": item.size, "type": "file"}
        identity = "ETag" if self._store == "s3" else "generation"
        extra = {} if item.version is None or self._store != "s3" else {"VersionId": item.version}
        return {**entry, identity: item.pin, **extra}

    def _folder(self, name: str) -> dict[str, Any]:
        return {"name": name, "size": 0, "type": "directory"}

    async def _list(self, source: Source, prefix: str, *, recursive: bool) -> Listing:
        assert isinstance(source, ListsFolders)
        return await source.list_below(prefix, recursive=recursive)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        source, key = self._split(path)
        bucket = self._strip_protocol(path).removesuffix(key).rstrip("/")
        found = await self._list(source, f"{key}/" if key else "", recursive=False)
        entries = [self._folder(f"{bucket}/{name.rstrip('/')}") for name in found.folders]
        entries += [self._entry(f"{bucket}/{item.key}", item) for item in found.items]
        if not entries and key:
            entries = [await self._info(path)]  # an object, or nothing
        entries.sort(key=lambda entry: str(entry["name"]))
        return entries if detail else [entry["name"] for entry in entries]

    async def _find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any
    ) -> list[str] | dict[str, Any]:
        if maxdepth is not None or withdirs:
            walked: list[str] | dict[str, Any] = await super()._find(path, maxdepth, withdirs, **options)
            return walked
        source, key = self._split(path)
        bucket = self._strip_protocol(path).removesuffix(key).rstrip("/")
        found = await self._list(source, f"{key}/" if key else "", recursive=True)
        entries = [self._entry(f"{bucket}/{item.key}", item) for item in found.items]
        if not entries and key:
            try:
                entries = [self._entry(path, await source.stat(key))]
            except ObjectNotFoundError:
                entries = []  # as for a folder that is not there, by fsspec's rules
        named = {entry["name"]: entry for entry in sorted(entries, key=lambda entry: str(entry["name"]))}
        return named if options.get("detail") else list(named)

    # -- reading -------------------------------------------------------------------------------------

    async def _read(self, source: Source, item: ObjectInfo, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` of the pinned object, asked for in pieces at once."""
        body = bytearray(end - start)
        memory, step = memoryview(body), self._config.request_bytes
        async with FlatTaskGroup() as group:
            for position in range(start, end, step):
                part = memory[position - start : min(position + step, end) - start]
                group.create_task(source.read_into(item, position, [part]))
        return bytes(body)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        source, item = await self._stat(path)
        return await self._read(source, item, *_bounds(item.size, start, end))

    async def _cat_ranges(
        self,
        paths: Sequence[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        batch_size: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        if max_gap is not None:
            raise NotImplementedError("ranges are not merged; leave max_gap out")
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        starts = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
        ends = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
        if not len(paths) == len(starts) == len(ends):
            raise ValueError("there must be as many starts and ends as paths")
        looks = {path: asyncio.ensure_future(self._stat(path)) for path in dict.fromkeys(paths)}

        async def read(path: str, start: int | None, end: int | None) -> bytes:
            source, item = await looks[path]
            return await self._read(source, item, *_bounds(item.size, start, end))

        tasks = [asyncio.ensure_future(read(*wanted)) for wanted in zip(paths, starts, ends, strict=True)]
        try:
            return await asyncio.gather(*tasks, return_exceptions=on_error == "return")
        finally:
            for task in (*tasks, *looks.values()):
                task.cancel()
            await asyncio.gather(*tasks, *looks.values(), return_exceptions=True)

    async def _get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        if os.path.isdir(lpath):  # noqa: ASYNC240
            return
        source, item = await self._stat(rpath)
        step = self._config.request_bytes * 8
        with open(lpath, "wb") as file:  # noqa: ASYNC230  opened once; what takes long is done in a thread
            for start in range(0, item.size, step):
                body = await self._read(source, item, start, min(start + step, item.size))
                await asyncio.to_thread(file.write, body)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> PinnedFile:
        if mode != "rb":
            protocol = self.protocol if isinstance(self.protocol, str) else self.protocol[0]
            raise io.UnsupportedOperation(f"{protocol}:// is read-only, and mode {mode!r} writes")
        source, item = sync(self.loop, self._stat, path)
        return PinnedFile(self, path, source, item, block_size=block_size, cache_options=cache_options, **options)

    async def _close(self) -> None:
        """Close every connection. The filesystem may be used again."""
        sources = list(self._sources.values())
        self._sources.clear()
        for source in sources:
            await source.close()

    def close(self) -> None:
        """As `_close`, for whoever runs no event loop."""
        sync(self.loop, self._close)


class GcsStreamFileSystem(S3StreamFileSystem):
    """Objects of Google Cloud Storage. See `S3StreamFileSystem`."""

    protocol = "s3stream+gs"
    _store = "gs"


class PinnedFile(AbstractBufferedFile):  # type: ignore[misc]
    """An object, open for reading, that fails with `ObjectChangedError` once it has been replaced."""

    def __init__(
        self, filesystem: S3StreamFileSystem, path: str, source: Source, item: ObjectInfo, **options: Any
    ) -> None:
        self._source = source
        self._item = item
        super().__init__(filesystem, path, "rb", size=item.size, **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        body: bytes = sync(self.fs.loop, self.fs._read, self._source, self._item, *_bounds(self._item.size, start, end))
        return body


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Read a range as Python reads a slice."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _close_all(sources: dict[str, Source], loop: asyncio.AbstractEventLoop | None, pid: int) -> None:
    """Close what a filesystem leaves behind, at the end of the process at the latest."""
    if loop is None or not loop.is_running() or pid != os.getpid() or not sources:
        return

    async def close() -> None:
        for source in sources.values():
            await source.close()

    closing = asyncio.run_coroutine_threadsafe(close(), loop)
    try:
        if asyncio.get_running_loop() is loop:
            return  # collected in the loop's own thread, which cannot wait for itself
    except RuntimeError:
        pass
    try:
        closing.result(_CLOSE_SECONDS)
    except (SourceError, TimeoutError):
        return  # nobody is left to be told
