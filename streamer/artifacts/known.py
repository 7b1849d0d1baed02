"""What of earlier fetches is in a folder, finished or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from streamer.artifacts.destination import WORK_FOLDER, Destination
from streamer.artifacts.journal import PART_SUFFIX, Journal, part_id
from streamer.artifacts.metadata import PINS_FILE, PulledFolder, read_marker
from streamer.checkpoint.partial import Partial, PartialFile
from streamer.errors import ConfigError
from streamer.sources.base import ObjectInfo

__all__ = ["PREVIOUS", "Known"]

PREVIOUS = "previous.json"
"""The marker, in the work folder, while what it speaks of is being replaced."""
_IDLE_SECONDS = 120.0


class Known:
    """What is there, as the markers and the journal have it.

    Args:
        url: of the source that is fetched from.
        items: its listing.
        note: told in a sentence why a marker counts for nothing.

    Attributes:
        marker: it was complete.
        ours: keys of files that we wrote.
        idle: sizes of unfinished files that can be gone on with, by name.
        named: unfinished files that a marker names.
        partial: files with holes, and for whom they are enough; None unless nothing has changed since.
    """

    def __init__(
        self,
        destination: Destination,
        journal: Journal,
        url: str,
        items: Sequence[ObjectInfo],
        note: Callable[[str], None],
    ) -> None:
        self._destination = destination
        self._journal = journal
        self._url = url
        self._note = note
        self._objects: dict[str, ObjectInfo] = {}
        self.ours: set[str] = set()
        self.named: dict[str, PartialFile] = {}
        self.partial: Partial | None = None
        self.marker = self._read_marker(destination.path, PINS_FILE)
        # A marker is withdrawn when a fetch begins to replace what it speaks of; that fetch has not ended then.
        markers = [self._read_marker(destination.path / WORK_FOLDER, PREVIOUS), self.marker]
        for marker in filter(None, markers):
            self.ours |= set(marker.here)
            if marker.partial is not None:
                self.named.update((file.name, file) for file in marker.partial.files.values())
            if marker.url == url:
                here = set(marker.here)
                self._objects.update((item.key, item) for item in marker.items if item.key in here)
        self.ours |= set(journal.finished)
        self.idle = self._find_idle()
        self._remind_journal()
        for marker in filter(None, markers):
            is_same = marker.url == url and set(marker.items) == set(items)
            if is_same and marker.partial is not None and self._has_all(marker.partial, items):
                self.partial = marker.partial

    def _read_marker(self, folder: Path, name: str) -> PulledFolder | None:
        try:
            return read_marker(folder, name)
        except ConfigError as error:
            self._note(f"{error.message}; all files are fetched anew")
            return None

    def _find_idle(self) -> dict[str, int]:
        """Return the unfinished files that nobody writes to. Without locks, their age must tell; an error is no harm.

        Those that a marker names are there to be read, and whoever goes on with them only fills holes.
        """
        now = time.time()
        found = {}
        for name, status in self._destination.parts().items():
            is_idle = self._destination.is_locked or now - status.st_mtime > _IDLE_SECONDS or name in self.named
            if name.endswith(PART_SUFFIX) and is_idle:
                found[name] = status.st_size
        return found

    def _remind_journal(self) -> None:
        """Tell the journal, which begins anew after each fetch, what is in files that a marker names."""
        for name, file in self.named.items():
            if name in self.idle and self._journal.arrived(name).nbytes < file.nbytes:
                self._journal.add_spans(name, file.spans)
        self._journal.read()

    def _has_all(self, partial: Partial, items: Sequence[ObjectInfo]) -> bool:
        by_key = {item.key: item for item in items}
        return all(
            key in by_key
            and by_key[key].pin is not None
            and file.name.startswith(part_id(self._url, by_key[key]))
            and self.idle.get(file.name) == file.size == by_key[key].size
            for key, file in partial.files.items()
        )

    def is_here(self, item: ObjectInfo) -> bool:
        """Whether the folder has this very version of a file, whole."""
        if item.pin is None:
            return False  # nothing says which version it is
        status = self._destination.status(item.key)
        if status is None or status.st_size != item.size:
            return False
        finished = self._journal.finished.get(item.key)
        if finished is None:
            return self._objects.get(item.key) == item
        # What was recorded need not have been renamed, nor, without locks, by the last who recorded it.
        return finished.get(status.st_ino, "").startswith(part_id(self._url, item))

    def is_held(self, item: ObjectInfo) -> bool:
        """Whether the folder has this very version of a file, be it with holes."""
        return self.is_here(item) or (self.partial is not None and item.key in self.partial.files)

    def bytes_of(self, keys: Iterable[str], parts: Iterable[str]) -> int:
        """Return what files, and unfinished files, take on disk."""
        unfinished = self._destination.parts()
        found = [*map(self._destination.status, keys), *map(unfinished.get, parts)]
        return sum(status.st_blocks * 512 for status in found if status is not None)
