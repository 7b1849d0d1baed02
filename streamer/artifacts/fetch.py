"""Fills a folder with a checkpoint, or with what of it is not weights, and says so when it is all there.

What an init container does, which may be killed at any point and started again, beside others on the same volume:

- The source is listed once. Every read is pinned to what the listing said.
- A file arrives in the work folder (`streamer.artifacts.arriving`), and gets its name when it is whole and synced.
- The marker (`streamer.artifacts.metadata.PINS_FILE`) comes last. It has the pins of the whole listing, by which
  engines stream the very weights that the metadata beside it was listed with.
- What an older version left is removed before anything of a newer one gets its name, and the marker before that.
- Nothing is removed but what a marker or the journal says that we wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamer.artifacts.arriving import Arriving, Part
from streamer.artifacts.choice import choose, covers
from streamer.artifacts.destination import WORK_FOLDER, Destination
from streamer.artifacts.integrity import IntegrityCheck
from streamer.artifacts.journal import PART_SUFFIX, Journal, part_id
from streamer.artifacts.metadata import PINS_FILE, Mode, PulledFolder, read_marker
from streamer.artifacts.room import require_room
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, ConfigError, DestinationError, NoSpaceError
from streamer.report import Checksums
from streamer.sources.base import ObjectInfo
from streamer.sources.open import local_path, open_source
from streamer.transport.loop import LoopThread

__all__ = ["Fetched", "fetch"]

_PREVIOUS = "previous.json"
_TICK_SECONDS = 1.0
_IDLE_SECONDS = 120.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a fetch came to.

    Attributes:
        mode: what the folder holds, which may be more than was asked for.
        files, nbytes: in the folder.
        skipped: files that were there already.
        resumed_bytes: that were there already of files that were not.
        fetched_bytes: that were not.
        removed: files of an older version.
        checksums: with ``integrity=checksums``.
    """

    url: str
    folder: Path
    mode: Mode
    files: int
    nbytes: int
    skipped: int
    resumed_bytes: int
    fetched_bytes: int
    removed: tuple[str, ...] = ()
    checksums: Checksums | None = None


def fetch(
    url: str,
    folder: Path,
    config: StreamConfig,
    *,
    mode: Mode = "metadata",
    max_bytes: int | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Fetched:
    """Make `folder` hold the files of `url`, fetching those that it has not. An interrupt leaves it to be gone on with.

    Args:
        max_bytes: fail, before anything is fetched, if the files have more together.
        progress: called with bytes that are here and bytes in all, every second at least, from another thread.
        note: told in a sentence why it takes longer.

    Raises:
        CheckpointError, SourceError: see `streamer.errors`.
        ObjectChangedError: an object was replaced meanwhile; the same call again takes the new one.
        NoSpaceError: before anything is fetched, if that can be known.
        DestinationError: the folder cannot be written to.
    """
    folder = folder.expanduser().absolute()
    local = local_path(url)
    if local is not None and local.exists() and folder.exists() and local.samefile(folder):
        raise ConfigError(f"{url} and {folder} are the same folder", hint="fetch into another one")
    say = note or _say_nothing
    check = IntegrityCheck(open_source(url, config), config)  # nothing is contacted yet
    with Destination(folder) as destination:
        destination.lock(lambda: say(f"another process fetches into {folder}; waiting for it"))
        if not destination.is_locked:
            say(f"the filesystem of {folder} has no locks; processes that fetch at once may do so twice")
        with Journal(destination) as journal:
            # What still runs when we are interrupted writes to the journal, so it ends first.
            loop = LoopThread(use_uvloop=config.use_uvloop)
            try:
                filling = _Filling(destination, journal, check, config, progress or _show_nothing, say)
                return loop.run(filling.run(mode, max_bytes))
            finally:
                loop.close(before=check.close)


def _say_nothing(text: str) -> None:
    pass


def _show_nothing(done: int, total: int) -> None:
    pass


@dataclass(slots=True)
class _Known:
    """What of earlier fetches is in the folder.

    Attributes:
        marker: it was complete.
        objects: files that a marker knows, from the same source.
        ours: keys of files that we wrote.
    """

    marker: PulledFolder | None = None
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    ours: set[str] = field(default_factory=set)


class _Filling:
    def __init__(
        self,
        destination: Destination,
        journal: Journal,
        check: IntegrityCheck,
        config: StreamConfig,
        progress: Progress,
        note: Callable[[str], None],
    ) -> None:
        self._destination = destination
        self._journal = journal
        self._check = check
        self._source = check.source
        self._config = config
        self._progress = progress
        self._note = note
        self._known = _Known()
        self._idle: dict[str, int] = {}
        self._done = self._total = 0

    async def run(self, mode: Mode, max_bytes: int | None) -> Fetched:
        items = tuple(await self._source.list())
        self._known = self._look_around()
        self._remember_parts()
        marker = self._known.marker
        if marker is not None and self._is_up_to_date(marker, items, mode):
            self._tidy()
            return self._result(marker, [])
        mode, wanted = await self._choose(items, mode)
        self._refuse_excess(wanted, max_bytes)
        missing = [item for item in wanted if not self._is_here(item)]
        parts = [Part(self._destination, self._journal, self._source.url, item, self._idle) for item in missing]
        old = sorted(self._known.ours - {item.key for item in wanted})
        self._remove_other_parts(parts)
        outdated = [item for item in missing if item.key in self._known.ours]
        outdated_bytes = self._bytes_of([*old, *(item.key for item in outdated)])
        require_room(self._destination, parts, self._source.url, outdated_bytes)
        await self._check.prepare(missing)
        self._remove_outdated(old, outdated)
        await self._fetch(parts, wanted)
        checksums = await self._check.settle()
        here = tuple(item.key for item in wanted)
        marker = PulledFolder(self._destination.path, self._source.url, items, here, mode)
        self._publish_marker(marker)
        return self._result(marker, parts, removed=tuple(old), checksums=checksums)

    def _result(
        self,
        marker: PulledFolder,
        parts: Sequence[Part],
        removed: tuple[str, ...] = (),
        checksums: Checksums | None = None,
    ) -> Fetched:
        here = set(marker.here)
        missing = sum(part.missing_bytes for part in parts)
        return Fetched(
            url=marker.url,
            folder=marker.folder,
            mode=marker.mode,
            files=len(here),
            nbytes=sum(item.size for item in marker.items if item.key in here),
            skipped=len(here) - len(parts),
            resumed_bytes=sum(part.item.size for part in parts) - missing,
            fetched_bytes=missing,
            removed=removed,
            checksums=checksums,
        )

    # -- before ----------------------------------------------------------------------------------------

    def _look_around(self) -> _Known:
        known = _Known(self._read_marker(self._destination.path, PINS_FILE))
        # A marker is withdrawn when a fetch begins to replace what it speaks of; that fetch has not ended then.
        for marker in (self._read_marker(self._destination.path / WORK_FOLDER, _PREVIOUS), known.marker):
            if marker is None:
                continue
            known.ours |= set(marker.here)
            if marker.url == self._source.url:
                here = set(marker.here)
                known.objects.update((item.key, item) for item in marker.items if item.key in here)
        known.ours |= set(self._journal.finished)
        return known

    def _remember_parts(self) -> None:
        """Learn which unfinished files nobody writes to. Without locks, their age must tell; an error is no harm."""
        now = time.time()
        for name, status in self._destination.parts().items():
            is_idle = self._destination.is_locked or now - status.st_mtime > _IDLE_SECONDS
            if name.endswith(PART_SUFFIX) and is_idle:
                self._idle[name] = status.st_size

    def _read_marker(self, folder: Path, name: str) -> PulledFolder | None:
        try:
            return read_marker(folder, name)
        except ConfigError as error:
            self._note(f"{error.message}; all files are fetched anew")
            return None

    def _is_up_to_date(self, marker: PulledFolder, items: Sequence[ObjectInfo], mode: Mode) -> bool:
        here = set(marker.here)
        return (
            marker.url == self._source.url
            and covers(marker.mode, mode)
            and set(marker.items) == set(items)
            and all(self._is_here(item) for item in items if item.key in here)
        )

    def _is_here(self, item: ObjectInfo) -> bool:
        """Whether the folder has this very version of a file."""
        if item.pin is None:
            return False  # nothing says which version it is
        status = self._destination.status(item.key)
        if status is None or status.st_size != item.size:
            return False
        finished = self._journal.finished.get(item.key)
        if finished is None:
            return self._known.objects.get(item.key) == item
        # What was recorded need not have been renamed, nor, without locks, by the last who recorded it.
        return finished.get(status.st_ino, "").startswith(part_id(self._source.url, item))

    async def _choose(self, items: Sequence[ObjectInfo], mode: Mode) -> tuple[Mode, list[ObjectInfo]]:
        """Return what to hold: everything, if what was not asked for is here already, in the right version."""
        wanted = await choose(self._source, self._config, items, mode)
        keys = {item.key for item in wanted}
        if self._known.ours - keys and mode != "all":
            with contextlib.suppress(CheckpointError):  # then there is no everything
                everything = await choose(self._source, self._config, items, "all")
                if all(self._is_here(item) for item in everything if item.key not in keys):
                    return "all", everything
        return mode, wanted

    def _refuse_excess(self, wanted: Sequence[ObjectInfo], max_bytes: int | None) -> None:
        total = sum(item.size for item in wanted)
        if max_bytes is not None and total > max_bytes:
            raise NoSpaceError(
                f"{self._source.url} has {total} bytes to fetch, and {max_bytes} are allowed",
                hint="allow more, give the volume that much, or fetch with another --mode",
            )

    def _bytes_of(self, keys: Iterable[str]) -> int:
        found = [self._destination.status(key) for key in keys]
        return sum(status.st_blocks * 512 for status in found if status is not None)

    # -- meanwhile -------------------------------------------------------------------------------------

    def _remove_outdated(self, old: Sequence[str], replaced: Sequence[ObjectInfo]) -> None:
        """Remove files of an older version first: beside newer ones, they would make a model that never was."""
        if (old or replaced) and self._known.marker is not None:
            self._destination.withdraw(PINS_FILE, _PREVIOUS)
        if not self._destination.is_locked:
            self._journal.read()  # others may have replaced some meanwhile
        for key in (*old, *(item.key for item in replaced if not self._is_here(item))):
            self._destination.remove(key)

    async def _fetch(self, parts: Sequence[Part], wanted: Sequence[ObjectInfo]) -> None:
        self._total = sum(item.size for item in wanted)
        self._done = self._total - sum(part.missing_bytes for part in parts)
        ticking = asyncio.ensure_future(self._tick())
        try:
            async with Arriving(self._source, self._config, check=self._check.check, arrived=self._count) as arriving:
                await arriving.fetch(parts)
        finally:
            ticking.cancel()
        self._progress(self._done, self._total)

    def _count(self, nbytes: int) -> None:
        self._done += nbytes

    async def _tick(self) -> None:
        """Show progress even when there is none."""
        while True:
            self._progress(self._done, self._total)
            await asyncio.sleep(_TICK_SECONDS)

    # -- after -----------------------------------------------------------------------------------------

    def _publish_marker(self, marker: PulledFolder) -> None:
        here = set(marker.here)
        if not self._destination.is_locked:
            self._journal.read()
        for item in marker.items:
            if item.key not in here:
                continue
            status = self._destination.status(item.key)
            is_right = status is not None and status.st_size == item.size
            if not self._destination.is_locked and item.pin is not None:
                is_right = self._is_here(item)  # others may have put another version in its place
            if not is_right:
                raise DestinationError(
                    f"{self._destination.path / item.key} was changed while the other files were fetched",
                    hint="see that nobody else writes to the folder, and run the same command again",
                )
        self._destination.write(PINS_FILE, marker.to_json())
        self._tidy()

    def _tidy(self) -> None:
        """Remove what was needed to go on. Without locks, others may still need theirs."""
        names = set(self._destination.parts()) if self._destination.is_locked else {_PREVIOUS}
        for name in names:
            self._destination.remove_part(name)

    def _remove_other_parts(self, parts: Sequence[Part]) -> None:
        """Remove unfinished files of versions that nobody fetches any more."""
        for name in set(self._idle) - {part.name for part in parts}:
            self._destination.remove_part(name)
