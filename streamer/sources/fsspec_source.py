"""Any other URL that fsspec knows: ``az://``, ``hf://``, ``http(s)://``, ``memory://``, chained ones.

Filesystems of fsspec read ranges, and promise nothing about what they read: there is no way to pin a read. So
an object's identity is looked up after its bytes have arrived, by a look that began after they had. Reads that
end together share one look.

Asynchronous filesystems run on fsspec's own loop, where what is not wanted any more can be cancelled and what takes
too long be given up; through threads, as fsspec's synchronous methods go, neither is possible. For ranges of 8 MiB over
HTTP that costs up to a third more CPU than threads, for those of 64 KiB a quarter less. Other filesystems are called in
threads. Some are not made for that (`_Turns`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from streamer.config import StreamConfig
from streamer.errors import (
    AccessDeniedError,
    ConfigError,
    MissingDependencyError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
    SourceUnavailableError,
)
from streamer.sources.base import ObjectInfo
from streamer.transport.failures import Place, bad_response, unavailable
from streamer.transport.retry import RetryPolicy, TransientFailure, call_with_retries
from streamer.transport.stats import TransferStats

__all__ = ["FsspecSource"]

logger = logging.getLogger("streamer")

#: What filesystems call the identity of an object's content, best first; sizes are compared in any case.
_IDENTITIES = (
    "generation",
    "etag",
    "ETag",
    "md5Hash",
    "content_md5",
    "sha256",
    "crc32c",
    "CRC",
    "Content-MD5",
    "Digest",
    "ino",
)
_TIMES = (
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "last_commit",
    "updated",
    "modified",
    "created",
    "date_time",
)


class FsspecSource:
    """The objects below a URL, through whatever filesystem fsspec has for it.

    Args:
        url: with any chaining that fsspec knows; credentials are found as that filesystem finds them.
        config: limits.

    Raises:
        ConfigError: no filesystem is known for the URL.
        MissingDependencyError: fsspec, or the filesystem's package, is not installed.
    """

    def __init__(self, url: str, config: StreamConfig) -> None:
        self._url = _without_secrets(url)
        self._stats = TransferStats()
        self._filesystem, root = _open(url, self._url)
        # What is there is asked of what a cache is of, which knows; the cache itself may have no way to tell.
        self._below = _without_caches(self._filesystem)
        self._root = root.rstrip("/")
        self._policy = RetryPolicy.from_config(config)
        self._gate = asyncio.Semaphore(config.concurrency)
        self._native = _is_native(self._filesystem)
        # In a thread, the first read of a file may bring all of it into a cache, however long that takes.
        self._limit = config.retry_deadline_seconds if self._native else None
        self._turns = _Turns(self._filesystem)
        _ask_for_what_is_stored(self._filesystem)
        self._threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix="s3stream-fsspec")
        self._looks: dict[str, tuple[float, asyncio.Future[ObjectInfo]]] = {}

    @property
    def url(self) -> str:
        return self._url

    @property
    def stats(self) -> TransferStats:
        return self._stats

    def label(self, key: str) -> str:
        return f"{self._url.rstrip('/')}/{key}"

    async def list(self) -> Sequence[ObjectInfo]:
        self._below.invalidate_cache()
        paths = await self._call(Place(self._url), "find", self._root)
        keys = [key for path in paths if (key := self._key(path)) and not key.endswith("/")]
        if not keys:
            raise ObjectNotFoundError("there are no objects here", url=self._url, hint="check the URL")
        # One by one, for listings may say less of an object than a look at it, which is what reads are held against.
        items = await asyncio.gather(*map(self.stat, keys))
        if any(item.pin is None for item in items):
            logger.warning("%s: this filesystem does not say when an object is replaced, unless its size is", self._url)
        return items

    def _key(self, path: str) -> str:
        below = path.removeprefix(self._root) if path.startswith(self._root) else ""
        return below.lstrip("/")

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        path = self._path(key)
        self._below.invalidate_cache(path)
        return _info(self.label(key), key, await self._call(Place(self.label(key)), "info", path))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if self._root else key

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        place = Place(self.label(item.key), start, start + sum(map(len, buffers)))
        body = await self._call(place, "cat_file", self._path(item.key), start=place.start, end=place.end)
        await self._require_unchanged(item, place)
        rest = memoryview(body)
        for buffer in buffers:
            buffer[:] = rest[: len(buffer)]
            rest = rest[len(buffer) :]
        self._stats.note_bytes(len(body))

    async def _require_unchanged(self, item: ObjectInfo, place: Place) -> None:
        """Look at the object anew, unless somebody began to after now."""
        arrived = time.monotonic()
        began, look = self._looks.get(item.key, (0.0, None))
        if look is None or began < arrived:
            # Let others whose reads end in this moment come along.
            look = asyncio.ensure_future(self._look_soon(item.key))
            self._looks[item.key] = (float("inf"), look)
        now = await asyncio.shield(look)
        if now != item:
            raise ObjectChangedError(
                "the object changed during the load",
                url=place.url,
                start=place.start,
                end=place.end,
                hint="load again when nobody writes to it",
            )

    async def _look_soon(self, key: str) -> ObjectInfo:
        await asyncio.sleep(0)
        self._looks[key] = (time.monotonic(), self._looks[key][1])
        return await self.stat(key)

    async def _call(self, place: Place, method: str, path: str, **options: Any) -> Any:
        """Call a method of the filesystem under the retry policy."""

        async def attempt(_: object) -> Any:
            async with self._gate:
                self._stats.requests += place.is_read
                try:
                    async with asyncio.timeout(self._limit):
                        result = await self._ask(method, path, options)
                except TimeoutError:
                    raise unavailable(place, f"the filesystem did not answer within {self._limit:g} s") from None
                except Exception as error:  # noqa: BLE001  filesystems raise what they like
                    raise _translated(place, error) from None
            if place.is_read and len(result) != options["end"] - options["start"]:
                raise bad_response(place, None, f"{len(result)} bytes")
            return result

        return await call_with_retries(attempt, self._policy, self._on_retry)

    def _ask(self, method: str, path: str, options: Mapping[str, Any]) -> Awaitable[Any]:
        filesystem = self._filesystem if method == "cat_file" else self._below
        if self._native:
            asked: Coroutine[Any, Any, Any] = getattr(filesystem, f"_{method}")(path, **options)
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, filesystem.loop))

        def work() -> Any:
            with self._turns.of(path):
                return getattr(filesystem, method)(path, **options)

        # A thread cannot be cancelled; what it returns late is dropped, and touches no buffer.
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _on_retry(self, _: TransientFailure) -> None:
        self._stats.retries += 1

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)  # one that is stuck may never end


class _Turns:
    """Who may call a synchronous filesystem meanwhile.

    Caches write into files that are already taken for whole (`simplecache`, `filecache`), or count blocks as there
    before they are (`blockcache`), so that a second thread would read short or get zeros. Archives other than zip seek
    in one file that all share.
    """

    def __init__(self, filesystem: Any) -> None:
        from fsspec.archive import AbstractArchiveFileSystem
        from fsspec.implementations.cached import CachingFileSystem
        from fsspec.implementations.zip import ZipFileSystem

        layers = list(_layers(filesystem))
        is_archive = any(isinstance(layer, AbstractArchiveFileSystem) for layer in layers)
        self._is_alone = is_archive and not any(isinstance(layer, ZipFileSystem) for layer in layers)
        self._by_path = any(isinstance(layer, CachingFileSystem) for layer in layers)
        for layer in layers:
            if isinstance(layer, CachingFileSystem):
                layer.check_files = True  # what was kept of another version of a file is not to be used
                if any(map(_has_files, layer.storage)):
                    logger.warning(
                        "%s: the cache has files of earlier runs, and with some filesystems fsspec does not notice "
                        "that they are old",
                        type(layer).__name__,
                    )
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def of(self, path: str) -> contextlib.AbstractContextManager[object]:
        """Return what to hold while `path` is asked for."""
        if self._is_alone:
            return self._lock
        if not self._by_path:
            return contextlib.nullcontext()
        with self._lock:
            return self._locks.setdefault(path, threading.Lock())


def _has_files(folder: str) -> bool:
    try:
        return bool(os.listdir(folder))
    except OSError:
        return False


def _layers(filesystem: Any) -> Iterator[Any]:
    seen: list[Any] = []
    while filesystem is not None and not any(filesystem is layer for layer in seen):
        seen.append(filesystem)
        yield filesystem
        filesystem = getattr(filesystem, "fs", None)


def _ask_for_what_is_stored(filesystem: Any) -> None:
    """Ask HTTP servers not to compress: a range of what is compressed is not the range of the file."""
    from fsspec.implementations.http import HTTPFileSystem

    for layer in _layers(filesystem):
        if isinstance(layer, HTTPFileSystem):
            layer.kwargs["headers"] = {"Accept-Encoding": "identity", **layer.kwargs.get("headers", {})}


def _without_caches(filesystem: Any) -> Any:
    from fsspec.implementations.cached import CachingFileSystem

    return next(layer for layer in _layers(filesystem) if not isinstance(layer, CachingFileSystem))


def _is_native(filesystem: Any) -> bool:
    """Whether a filesystem, with whatever it wraps, is asynchronous and runs on fsspec's loop."""
    # By type, for caches pass on what they are asked about to what they wrap.
    layers = list(_layers(filesystem))
    return all(type(layer).async_impl for layer in layers) and getattr(filesystem, "loop", None) is not None


def _translated(place: Place, error: Exception) -> Exception:
    if isinstance(error, (SourceError, TransientFailure)):
        return error

    def make(kind: type[SourceError], text: str, hint: str | None = None) -> SourceError:
        return kind(text, url=place.url, start=place.start, end=place.end, status=status, hint=hint)

    answer = getattr(error, "response", None)
    found = (getattr(error, "status", None), getattr(error, "status_code", None), getattr(answer, "status_code", None))
    status = next((value for value in found if isinstance(value, int)), None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return make(ObjectChangedError if place.is_read else ObjectNotFoundError, "not found")
    if isinstance(error, PermissionError) or status in (401, 403):
        return make(AccessDeniedError, "access denied", "check the credentials that this filesystem goes by")
    # The message may hold a signed URL; the class says enough.
    said = f"the filesystem failed with {type(error).__name__}"
    if isinstance(error, (NotImplementedError, TypeError, AttributeError)):
        return make(SourceError, said, "it cannot read ranges in the way that fsspec describes")
    if status is not None and status < 500 and status not in (408, 425, 429):
        return make(SourceError, said)
    return TransientFailure(make(SourceUnavailableError, said))


def _open(url: str, label: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependencyError(f"{label} needs the package fsspec", hint="pip install fsspec") from error
    try:
        filesystem, root = url_to_fs(url, skip_instance_cache=True)
    except ImportError as error:
        raise MissingDependencyError(f"{label} needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{label}: fsspec has no filesystem for this URL ({error})") from error
    return filesystem, str(root)


def _info(label: str, key: str, info: Mapping[str, Any]) -> ObjectInfo:
    size = info.get("size")
    if size is None:
        raise SourceError("the filesystem does not tell the object's size", url=label)
    for name in (*_IDENTITIES, *_TIMES):
        if info.get(name) not in (None, ""):
            return ObjectInfo(key, int(size), f"{name}={info[name]}-{size}")
    return ObjectInfo(key, int(size), None)


def _without_secrets(url: str) -> str:
    """Drop user and password, and queries, in which signatures are."""
    url = re.sub(r"(://)[^/@:]*(?::[^/@]*)?@", r"\1", url)
    return re.sub(r"\?[^:]*", "", url)
