"""What has arrived of files that are being fetched, so that a fetch that was killed goes on where it was.

Records are lines with a checksum each, only ever appended. One is written after what it speaks of is on disk, so what
a power failure takes with it is at most known too little of. A line that is torn, or mixed with that of another process
on a filesystem without locks, is as if it were not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Sequence
from typing import Any

from streamer.artifacts.destination import Destination, telling
from streamer.checkpoint.regions import Intervals
from streamer.sources.base import ObjectInfo

__all__ = ["PART_SUFFIX", "Journal", "part_id"]

PART_SUFFIX = ".part"
_NAME = "journal"
_FORMAT = 1


def part_id(url: str, item: ObjectInfo) -> str:
    """Name one version of an object; the unfinished files that hold some of it have names that begin so.

    Without a pin nothing tells versions apart, and the name is new each time.
    """
    nonce = os.urandom(16).hex() if item.pin is None else ""
    facts = json.dumps([_FORMAT, url, item.key, item.size, item.pin, item.version, nonce])
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


class Journal:
    """The records of one folder; a context manager. Threads may append at once.

    Attributes:
        finished: by key and inode, the parts that were given this name, or are about to be.
    """

    def __init__(self, destination: Destination) -> None:
        self._where = destination.path
        self._lock = threading.Lock()
        self._arrived: dict[str, Intervals] = {}
        self.finished: dict[str, dict[int, str]] = {}
        with telling(f"keep a journal in {self._where}"):
            self._descriptor = destination.open_part(_NAME, os.O_CREAT | os.O_APPEND)
            try:
                os.fsync(destination.work)
                self.read()
            except BaseException:
                os.close(self._descriptor)
                raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self) -> None:
        """Read all records, those that others have added meanwhile too."""
        with telling(f"read the journal in {self._where}"), open(os.dup(self._descriptor), "rb") as file:
            self._arrived, self.finished = {}, {}
            file.seek(0)
            for line in file:
                self._read(line)

    def _read(self, line: bytes) -> None:
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if checksum != _checksum(text):
            return
        match json.loads(text):
            case ["span", str(part), int(start), int(end)]:
                self._arrived.setdefault(part, Intervals()).add(start, end)
            case ["finished", str(part), str(key), int(inode)]:
                self.finished.setdefault(key, {})[inode] = part
            case ["void", str(part)]:
                self._arrived.pop(part, None)

    def arrived(self, part: str) -> Intervals:
        """Return which bytes of a part are on disk; the caller's own copy."""
        copy = Intervals()
        for start, end in self._arrived.get(part, Intervals()).spans():
            copy.add(start, end)
        return copy

    def add_spans(self, part: str, spans: Sequence[tuple[int, int]]) -> None:
        """Record bytes that are on disk."""
        self._append([["span", part, start, end] for start, end in spans])

    def add_finished(self, part: str, key: str, inode: int) -> None:
        """Record that a part is whole and on disk, before it gets its name."""
        self._append([["finished", part, key, inode]])

    def forget(self, part: str) -> None:
        """Record that nothing of a part is on disk."""
        self._append([["void", part]])

    def _append(self, records: Sequence[Sequence[Any]]) -> None:
        lines = [json.dumps(record).encode() for record in records]
        # An earlier process may have been killed in the middle of a line.
        body = b"\n" + b"".join(_checksum(line) + b" " + line + b"\n" for line in lines)
        with self._lock, telling(f"keep a journal in {self._where}"):
            while body:
                body = body[os.write(self._descriptor, body) :]
            os.fdatasync(self._descriptor)


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
