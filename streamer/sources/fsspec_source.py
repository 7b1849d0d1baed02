"""Any other URL that fsspec knows: ``gs://``, ``az://``, ``hf://``, ``http(s)://``, chained ones.

Filesystems of fsspec read ranges, and promise nothing about what they read: there is no way to pin a read. So
an object's identity is looked up after its bytes have arrived, by a look that began after they had. Reads that
end together share one look.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from streamer.config import StreamConfig
from streamer.errors import (
    AccessDeniedError,
    ConfigError,
    MissingDependencyError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
)
from streamer.sources.base import ObjectInfo
from streamer.transport.failures import Place, bad_response, unavailable
from streamer.transport.retry import RetryPolicy, TransientFailure, call_with_retries
from streamer.transport.stats import TransferStats

__all__ = ["FsspecSource"]

logger = logging.getLogger("streamer")

T = TypeVar("T")

#: What filesystems call the identity of an object's content, best first; sizes are compared in any case.
_IDENTITIES = ("generation", "etag", "ETag", "md5Hash", "content_md5", "sha256", "crc32c", "CRC", "ino")
_TIMES = ("mtime", "LastModified", "last_modified", "last_commit", "updated", "modified", "created", "date_time")


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
        self._root = root.rstrip("/")
        self._policy = RetryPolicy.from_config(config)
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
        paths = await self._call(Place(self._url), self._find)
        keys = [key for path in paths if (key := self._key(path)) and not key.endswith("/")]
        if not keys:
            raise ObjectNotFoundError("there are no objects here", url=self._url, hint="check the URL")
        # One by one, for listings may say less of an object than a look at it, which is what reads are held against.
        items = await asyncio.gather(*map(self.stat, keys))
        if any(item.pin is None for item in items):
            logger.warning("%s: this filesystem does not say when an object is replaced, unless its size is", self._url)
        return items

    def _find(self) -> Sequence[str]:
        self._filesystem.invalidate_cache()
        return tuple(self._filesystem.find(self._root))

    def _key(self, path: str) -> str:
        below = path.removeprefix(self._root) if path.startswith(self._root) else ""
        return below.lstrip("/")

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        return await self._call(Place(self.label(key)), lambda: self._look(key))

    def _look(self, key: str) -> ObjectInfo:
        path = self._path(key)
        self._filesystem.invalidate_cache(path)
        return _info(key, self._filesystem.info(path))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if self._root else key

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        place = Place(self.label(item.key), start, start + sum(map(len, buffers)))
        body = await self._call(place, lambda: self._read(item.key, place))
        await self._require_unchanged(item, place)
        rest = memoryview(body)
        for buffer in buffers:
            buffer[:] = rest[: len(buffer)]
            rest = rest[len(buffer) :]
        self._stats.note_bytes(len(body))

    def _read(self, key: str, place: Place) -> bytes:
        body: bytes = self._filesystem.cat_file(self._path(key), start=place.start, end=place.end)
        assert place.start is not None
        assert place.end is not None
        if len(body) != place.end - place.start:
            raise bad_response(place, None, f"{len(body)} bytes")
        return body

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

    async def _call(self, place: Place, work: Callable[[], T]) -> T:
        """Run `work` in a thread under the retry policy."""

        async def attempt(_: object) -> T:
            self._stats.requests += place.is_read
            # A thread cannot be cancelled; what it returns late is dropped, and touches no buffer.
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._translated, place, work)

        return await call_with_retries(attempt, self._policy, self._on_retry)

    def _on_retry(self, _: TransientFailure) -> None:
        self._stats.retries += 1

    def _translated(self, place: Place, work: Callable[[], T]) -> T:
        try:
            return work()
        except (SourceError, TransientFailure):
            raise
        except FileNotFoundError as error:
            kind: type[SourceError] = ObjectChangedError if place.is_read else ObjectNotFoundError
            raise kind("not found", url=place.url, start=place.start, end=place.end) from error
        except PermissionError as error:
            raise AccessDeniedError("access denied", url=place.url, start=place.start, end=place.end) from error
        except Exception as error:  # noqa: BLE001  filesystems raise what they like
            # The message may hold a signed URL; the class says enough.
            raise unavailable(place, f"the filesystem failed with {type(error).__name__}") from None

    async def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


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


def _info(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    size = info.get("size")
    if size is None:
        raise SourceError("the filesystem does not tell the object's size", url=key)
    for name in (*_IDENTITIES, *_TIMES):
        if info.get(name) not in (None, ""):
            return ObjectInfo(key, int(size), f"{name}={info[name]}-{size}")
    return ObjectInfo(key, int(size), None)


def _without_secrets(url: str) -> str:
    """Drop user and password, and queries, in which signatures are."""
    url = re.sub(r"(://)[^/@:]*(?::[^/@]*)?@", r"\1", url)
    return re.sub(r"\?[^:]*", "", url)
