"""Files in a local folder, read with ``preadv`` on a few threads."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from streamer.errors import AccessDeniedError, ObjectChangedError, ObjectNotFoundError, SourceError
from streamer.sources.base import ObjectInfo
from streamer.transport.scatter import Scatter
from streamer.transport.stats import TransferStats

__all__ = ["LocalSource"]

_IOV_MAX = 1024  # POSIX minimum is 16, Linux has 1024


class LocalSource:
    """The files below `root`. Symbolic links are followed, so a hub cache snapshot works.

    Files are pinned by device, inode, size and modification time.

    Args:
        root: an existing folder.
        threads: reads in flight.
    """

    def __init__(self, root: Path, *, threads: int) -> None:
        self._root = root
        self._stats = TransferStats()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="s3stream-read")

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    @property
    def stats(self) -> TransferStats:
        return self._stats

    def label(self, key: str) -> str:
        return str(self._root / key)

    async def list(self) -> Sequence[ObjectInfo]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._walk)

    def _walk(self) -> Sequence[ObjectInfo]:
        if not self._root.is_dir():
            raise ObjectNotFoundError("no such folder", url=str(self._root), hint="check the path")
        found = []
        for folder, subfolders, names in os.walk(self._root, onerror=self._on_walk_error):
            subfolders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                key = path.relative_to(self._root).as_posix()
                try:
                    found.append(_info(key, path.stat()))
                except FileNotFoundError:
                    continue  # a dangling link, or deleted while we walk; nothing can be read from it
        if not found:
            raise ObjectNotFoundError("the folder is empty", url=str(self._root), hint="check the path")
        return found

    def _on_walk_error(self, error: OSError) -> None:
        raise self._translate(error, str(error.filename)) from error

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        try:
            return _info(key, (self._root / key).stat())
        except OSError as error:
            raise self._translate(error, self.label(key)) from error

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        self._stats.requests += 1
        # A thread cannot be cancelled. Waiting for it, even when we are, keeps the promise that nothing
        # writes to the buffers afterwards.
        reading = asyncio.get_running_loop().run_in_executor(self._threads, self._read, item, start, buffers)
        try:
            self._stats.note_bytes(await asyncio.shield(reading))
        except asyncio.CancelledError:
            await asyncio.wait([reading])
            raise

    def _read(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> int:
        scatter = Scatter(buffers)
        end = start + scatter.length
        path = self.label(item.key)
        try:
            # Opened anew each time: microseconds against megabytes, and no limit on files to keep.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._fill(descriptor, item, start, scatter, path)
            finally:
                os.close(descriptor)
        except OSError as error:
            if isinstance(error, SourceError):
                raise
            raise self._translate(error, path, start, end) from error
        return scatter.length

    @staticmethod
    def _fill(descriptor: int, item: ObjectInfo, start: int, scatter: Scatter, path: str) -> None:
        end = start + scatter.length
        if _info(item.key, os.fstat(descriptor)).pin != item.pin:
            raise ObjectChangedError(
                "the file changed during the load", url=path, start=start, end=end, hint="load again"
            )
        while scatter.remaining:
            count = os.preadv(descriptor, scatter.rest()[:_IOV_MAX], start + scatter.filled)
            if not count:
                raise ObjectChangedError("the file became shorter", url=path, start=start, end=end)
            while count:
                step = min(count, len(scatter.view))
                scatter.advance(step)
                count -= step

    @staticmethod
    def _translate(error: OSError, path: str, start: int | None = None, end: int | None = None) -> SourceError:
        kind: type[SourceError] = SourceError
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            kind = ObjectNotFoundError
        elif isinstance(error, PermissionError):
            kind = AccessDeniedError
        hint = "raise the limit with `ulimit -n`" if error.errno in (errno.EMFILE, errno.ENFILE) else None
        return kind(error.strerror or str(error), url=path, start=start, end=end, hint=hint)

    async def close(self) -> None:
        self._threads.shutdown(wait=True)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    pin = f"{status.st_dev:x}-{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"
    return ObjectInfo(key, status.st_size, pin)
