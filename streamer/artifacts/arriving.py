"""Brings the bytes of objects to disk: many ranges at once, memory that does not grow with them, progress that stays.

Each worker has one buffer; a range is received into it and written from it in a thread. A file's ranges are synced and
recorded every now and then, all that have come meanwhile at once and beside the others, so nobody waits for that, and
yet a process that is killed loses little more than what was under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from streamer.artifacts.destination import Destination, telling
from streamer.artifacts.journal import PART_SUFFIX, Journal, part_id
from streamer.checkpoint.partial import PartialFile
from streamer.checkpoint.regions import Intervals
from streamer.config import StreamConfig
from streamer.errors import DestinationError
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.tasks import FlatTaskGroup

__all__ = ["Arriving", "Part"]

T = TypeVar("T")

_THREADS = 4
#: Between two times that a file is synced; more where a disk takes longer for it, so that it gathers what it writes.
_RECORD_SECONDS = 0.05


class Part:
    """One file on its way. Methods that touch the disk are for threads.

    An unfinished file has a name that was never used before and never will be again, so that what the journal says of
    it is of no other. Another process that fetches the same may find it and go on with it, even at the same time where
    there are no locks: both write the same bytes.

    Args:
        sizes: of unfinished files with which to go on.
        spans: all of the file that will ever be here; None for the whole of it. A file with holes gets no name but
            this one, see `streamer.checkpoint.partial`.

    Attributes:
        name: of the unfinished file.
        needed_bytes: that shall be here.
        is_new: whether it is not there yet.
        missing: ranges that are not here yet.
        left: reads that have not been written.
        recording: held while what was written is synced and recorded.
        record_after: time before which that need not be done again.
    """

    def __init__(
        self,
        destination: Destination,
        journal: Journal,
        url: str,
        item: ObjectInfo,
        sizes: Mapping[str, int],
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.item = item
        self._destination = destination
        self._journal = journal
        version = part_id(url, item)
        found = [name for name, size in sizes.items() if name.startswith(version) and size == item.size]
        self.is_new = not found
        self.name = f"{version}-{os.urandom(8).hex()}{PART_SUFFIX}"
        needed = [(0, item.size)] if spans is None else spans
        self.needed_bytes = sum(end - start for start, end in needed)
        self._has_holes = self.needed_bytes < item.size
        self._arrived = Intervals()
        if found:
            self.name = max(found, key=lambda name: journal.arrived(name).nbytes)
            self._arrived = journal.arrived(self.name)
            if self.name in journal.finished.get(item.key, {}).values():
                self._arrived.add(0, item.size)
        self.missing = [span for start, end in needed for span in self._arrived.missing(start, end)]
        self.left = 0
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._written: list[tuple[int, int]] = []
        self._is_suspect = False
        self.recording = asyncio.Lock()
        self.record_after = 0.0

    @property
    def missing_bytes(self) -> int:
        return sum(end - start for start, end in self.missing)

    @property
    def held(self) -> PartialFile | None:
        """What there is of a file that stays with holes; None for one that will be whole."""
        if not self._has_holes:
            return None
        return PartialFile(self.name, self.item.size, tuple(self._arrived.spans()))

    def missing_on_disk(self, block_bytes: int) -> int:
        """Return how many bytes the missing ranges take on disk, where all begin and end with whole blocks."""
        blocks = Intervals()
        for start, end in self.missing:
            blocks.add(start // block_bytes, -(-end // block_bytes))
        return blocks.nbytes * block_bytes

    def open(self) -> None:
        """Open the file, or make it at its full size, all holes. Idempotent."""
        with self._lock, telling(f"write {self._destination.path / self.item.key}"):
            if self._descriptor is not None:
                return
            self._descriptor = self._destination.open_part(self.name, os.O_CREAT | os.O_EXCL if self.is_new else 0)
            if self.is_new:
                os.ftruncate(self._descriptor, self.item.size)
                os.fsync(self._descriptor)
                os.fsync(self._destination.work)

    def write(self, start: int, memory: memoryview) -> None:
        """Write a range."""
        assert self._descriptor is not None
        position, rest = start, memory
        with telling(f"write {self._destination.path / self.item.key}"):
            while rest:
                count = os.pwrite(self._descriptor, rest, position)
                position, rest = position + count, rest[count:]
        with self._lock:
            self._written.append((start, start + len(memory)))

    def record(self) -> None:
        """Sync and record what was written since."""
        with self._lock:
            written, self._written = self._written, []
        if not written or self._descriptor is None or self._is_suspect:
            return
        with telling(f"write {self._destination.path / self.item.key}"):
            # Linux tells once of bytes that it could not write; a second sync succeeds without them.
            self._is_suspect = True
            os.fdatasync(self._descriptor)
            self._is_suspect = False
        self._journal.add_spans(self.name, written)
        for span in written:
            self._arrived.add(*span)

    def read(self, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` with what has arrived."""
        assert self._descriptor is not None
        with telling(f"read {self._destination.path / self.item.key}"):
            for buffer in buffers:
                rest = buffer
                while rest:
                    count = os.preadv(self._descriptor, [rest], start)
                    if not count:
                        raise OSError("it became shorter")
                    start, rest = start + count, rest[count:]

    def finish(self) -> None:
        """Give the file, all of which was written, its name; or see that what a file with holes has is recorded."""
        assert self._descriptor is not None
        if self._has_holes:
            self.record()
        if self._is_suspect:
            raise DestinationError(
                f"{self._destination.path / self.item.key} could not be synced", hint="see the volume"
            )
        with telling(f"write {self._destination.path / self.item.key}"):
            os.fsync(self._descriptor)
            inode = os.fstat(self._descriptor).st_ino
        if self._has_holes:
            self.close()
            return
        self._journal.add_finished(self.name, self.item.key, inode)
        self._destination.publish(self.name, self.item.key)
        self.close()

    def discard(self) -> None:
        """Remove what has arrived: it is not what it should be."""
        self.close()
        self._journal.forget(self.name)
        self._destination.remove_part(self.name)

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None
            self._written = []


class Arriving:
    """Fetches parts, in order, several at once; an async context manager.

    Args:
        check: awaited when all of a part is here; an error of it means that the bytes are wrong.
        arrived: told of bytes that were written.
    """

    def __init__(
        self,
        source: Source,
        config: StreamConfig,
        *,
        check: Callable[[Part, Arriving], Awaitable[None]],
        arrived: Callable[[int], None],
    ) -> None:
        self._source = source
        self._chunk_bytes = min(config.request_bytes, config.buffer_bytes)
        self._workers = max(1, min(config.concurrency, config.buffer_bytes // self._chunk_bytes))
        self._check = check
        self._arrived = arrived
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="s3stream-write")
        self._open: set[Part] = set()

    async def __aenter__(self) -> Arriving:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Record what has been written, whatever happened."""
        try:
            for part in list(self._open):
                # After a failure that is itself of the disk, what can be recorded is.
                with contextlib.suppress(OSError):
                    await self.in_thread(part.record)
                part.close()
        finally:
            self._threads.shutdown(wait=True)

    async def in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run `work` beside the event loop; when this ends, so has that."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()
            raise

    async def fetch(self, parts: Sequence[Part]) -> None:
        """Bring all `parts` here and give them their names.

        Raises:
            DestinationError, SourceError: see `streamer.errors`.
        """
        upcoming = self._ranges(parts)
        async with FlatTaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._work(upcoming, group))

    def _ranges(self, parts: Sequence[Part]) -> Iterator[tuple[Part, int, int]]:
        for part in parts:
            ranges = [
                (position, min(position + self._chunk_bytes, end))
                for start, end in part.missing
                for position in range(start, end, self._chunk_bytes)
            ] or [(0, 0)]
            part.left = len(ranges)
            for start, end in ranges:
                yield part, start, end

    async def _work(self, upcoming: Iterator[tuple[Part, int, int]], group: asyncio.TaskGroup) -> None:
        buffer: memoryview | None = None
        for part, start, end in upcoming:
            self._open.add(part)
            await self.in_thread(part.open)
            if start < end:
                if buffer is None:
                    buffer = memoryview(bytearray(self._chunk_bytes))
                view = buffer[: end - start]
                await self._source.read_into(part.item, start, [view])
                await self.in_thread(part.write, start, view)
                self._arrived(end - start)
            part.left -= 1
            if not part.left:
                await self._finish(part)
            elif not part.recording.locked() and time.monotonic() >= part.record_after:
                group.create_task(self._record(part))

    async def _record(self, part: Part) -> None:
        async with part.recording:
            began = time.monotonic()
            await self.in_thread(part.record)
            now = time.monotonic()
            part.record_after = now + max(_RECORD_SECONDS, now - began)

    async def _finish(self, part: Part) -> None:
        async with part.recording:
            await self._check(part, self)
            await self.in_thread(part.finish)
            self._open.discard(part)
