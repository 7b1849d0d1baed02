"""Fills a folder with a checkpoint, or with what of it is not weights, and says so when it is all there.

What an init container does, which may be killed at any point and started again, beside others on the same volume:

- The source is listed once. Every read is pinned to what the listing said.
- A file arrives in the work folder (`streamer.artifacts.arriving`), and gets its name when it is whole and synced.
- The marker (`streamer.artifacts.metadata.PINS_FILE`) comes last. It has the pins of the whole listing, by which
  engines stream the very weights that the metadata beside it was listed with.
- What an older version left is removed before anything of a newer one gets its name, and the marker before that.
- Nothing is removed but what a marker or the journal says that we wrote.
- Weights that are fetched for some ranks never get their names; `streamer.checkpoint.partial` says why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from streamer.artifacts.arriving import Arriving, Part
from streamer.artifacts.choice import choose, covers
from streamer.artifacts.destination import Destination
from streamer.artifacts.fetched import Fetched
from streamer.artifacts.integrity import IntegrityCheck
from streamer.artifacts.journal import Journal
from streamer.artifacts.known import PREVIOUS, Known
from streamer.artifacts.metadata import PINS_FILE, Mode, PulledFolder
from streamer.artifacts.ranks import Needs, RankSpans, Spans, read_headers
from streamer.artifacts.room import require_room
from streamer.checkpoint.partial import Layout, Partial, PartialFile
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, ConfigError, DestinationError, NoSpaceError
from streamer.sources.base import ObjectInfo
from streamer.sources.open import local_path, open_source
from streamer.transport.loop import LoopThread

__all__ = ["Fetched", "fetch"]

_TICK_SECONDS = 1.0

Progress = Callable[[int, int], None]


def fetch(
    url: str,
    folder: Path,
    config: StreamConfig,
    *,
    mode: Mode = "metadata",
    ranks: RankSpans | None = None,
    max_bytes: int | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Fetched:
    """Make `folder` hold the files of `url`, fetching those that it has not. An interrupt leaves it to be gone on with.

    Args:
        ranks: of the weights, only what these need. What is there for others stays, if nothing has changed.
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
    if ranks is not None and (mode == "metadata" or config.integrity == "checksums"):
        what = f"mode={mode} has no weights" if mode == "metadata" else "integrity=checksums needs whole files"
        raise ConfigError(
            f"cannot fetch weights for some ranks: {what}",
            hint="fetch with --mode weights or all, and another integrity",
        )
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
                layout = ranks.layout_with(config) if ranks is not None else None
                found = loop.run(filling.look(mode, layout))
                if found is not None:
                    return found
                needs = None
                if ranks is not None:
                    checkpoint = loop.run(read_headers(check.source, config, filling.items))
                    needs = ranks.find(checkpoint, filling.items, config)
                return loop.run(filling.run(mode, needs, max_bytes))
            finally:
                loop.close(before=check.close)


def _say_nothing(text: str) -> None:
    pass


def _show_nothing(done: int, total: int) -> None:
    pass


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
        self._known: Known
        self._spans: Spans = {}
        self._done = self._total = 0
        self.items: tuple[ObjectInfo, ...] = ()

    async def look(self, mode: Mode, layout: Layout | None) -> Fetched | None:
        """List the source, and return what the folder has if that is all that is asked for."""
        self.items = tuple(await self._source.list())
        self._known = Known(self._destination, self._journal, self._source.url, self.items, self._note)
        marker = self._known.marker
        if marker is None or not self._is_up_to_date(marker, mode, layout):
            return None
        self._tidy(marker)
        return Fetched.of(marker, [])

    async def run(self, mode: Mode, needs: Needs | None, max_bytes: int | None) -> Fetched:
        """Fetch what is missing.

        Args:
            needs: of the weights, what to fetch and for whom; None for all.
        """
        known = self._known
        if needs is not None:
            self._spans = needs.spans(known.partial, await self._check.manifest())
        elif mode == "metadata" and known.partial is not None:
            self._spans = {key: file.spans for key, file in known.partial.files.items()}
        mode, wanted = await self._choose(mode)
        self._refuse_excess(wanted, max_bytes)
        kept = {item.key: file for item in wanted if (file := self._kept(item)) is not None}
        missing = [item for item in wanted if item.key not in kept and not known.is_here(item)]
        parts = [
            Part(self._destination, self._journal, self._source.url, item, known.idle, self._spans.get(item.key))
            for item in missing
        ]
        old = sorted(known.ours - {item.key for item in wanted})
        outdated = [item for item in missing if item.key in known.ours]
        dropped = self._remove_other_parts(parts, kept)
        outdated_bytes = known.bytes_of([*old, *(item.key for item in outdated)], dropped)
        require_room(self._destination, parts, self._source.url, outdated_bytes)
        await self._check.prepare(missing)
        self._withdraw_marker(parts, [*old, *outdated, *dropped])
        self._remove_outdated(old, outdated, dropped)
        await self._fetch(parts, wanted)
        checksums = await self._check.settle()
        files = kept | {part.item.key: part.held for part in parts if part.held is not None}
        layouts = known.partial.layouts if known.partial is not None else ()
        if needs is not None:
            layouts = needs.layout.join(layouts)
        here = tuple(item.key for item in wanted if item.key not in files)
        partial = Partial(layouts, files) if files else None
        marker = PulledFolder(self._destination.path, self._source.url, self.items, here, mode, partial)
        self._publish_marker(marker)
        return Fetched.of(marker, parts, removed=tuple(old), checksums=checksums)

    # -- before ----------------------------------------------------------------------------------------

    def _is_up_to_date(self, marker: PulledFolder, mode: Mode, layout: Layout | None) -> bool:
        here = set(marker.here)
        return (
            marker.url == self._source.url
            and covers(marker, mode, layout)
            and set(marker.items) == set(self.items)
            and all(self._known.is_here(item) for item in self.items if item.key in here)
            and self._known.partial == marker.partial
        )

    async def _choose(self, mode: Mode) -> tuple[Mode, list[ObjectInfo]]:
        """Return what to hold: everything, if what was not asked for is here already, in the right version."""
        wanted = await choose(self._source, self._config, self.items, mode)
        keys = {item.key for item in wanted}
        known = self._known
        others = known.ours.union(known.partial.files if known.partial is not None else ()) - keys
        if others and mode != "all":
            with contextlib.suppress(CheckpointError):  # then there is no everything
                everything = await choose(self._source, self._config, self.items, "all")
                if all(known.is_held(item) for item in everything if item.key not in keys):
                    return "all", everything
        return mode, wanted

    def _kept(self, item: ObjectInfo) -> PartialFile | None:
        """Return a file with holes that is to stay as it is."""
        file = self._known.partial.files.get(item.key) if self._known.partial is not None else None
        spans = self._spans.get(item.key)
        if file is None or spans is None or self._known.is_here(item):
            return None
        is_whole = sum(end - start for start, end in spans) == item.size
        return file if not is_whole and all(file.holds(*span) for span in spans) else None

    def _size(self, item: ObjectInfo) -> int:
        """Return how many bytes of a file the folder is to hold."""
        spans = self._spans.get(item.key)
        if spans is None or self._known.is_here(item):
            return item.size
        return sum(end - start for start, end in spans)

    def _refuse_excess(self, wanted: Sequence[ObjectInfo], max_bytes: int | None) -> None:
        total = sum(map(self._size, wanted))
        if max_bytes is not None and total > max_bytes:
            raise NoSpaceError(
                f"{self._source.url} has {total} bytes to fetch, and {max_bytes} are allowed",
                hint="allow more, give the volume that much, or fetch with another --mode",
            )

    def _remove_other_parts(self, parts: Sequence[Part], kept: Mapping[str, PartialFile]) -> list[str]:
        """Remove unfinished files that nobody goes on with; return those of them that a marker still names."""
        others = set(self._known.idle) - {part.name for part in parts} - {file.name for file in kept.values()}
        for name in others - set(self._known.named):
            self._destination.remove_part(name)
        return sorted(others & set(self._known.named))

    # -- meanwhile -------------------------------------------------------------------------------------

    def _withdraw_marker(self, parts: Sequence[Part], outdated: Sequence[object]) -> None:
        """See that no marker speaks of what is about to go, or to get its name."""
        gets_name = any(part.held is None and part.name in self._known.named for part in parts)
        if (outdated or gets_name) and self._known.marker is not None:
            self._destination.withdraw(PINS_FILE, PREVIOUS)

    def _remove_outdated(self, old: Sequence[str], replaced: Sequence[ObjectInfo], parts: Sequence[str]) -> None:
        """Remove files of an older version first: beside newer ones, they would make a model that never was."""
        if not self._destination.is_locked:
            self._journal.read()  # others may have replaced some meanwhile
        for key in (*old, *(item.key for item in replaced if not self._known.is_here(item))):
            self._destination.remove(key)
        for name in parts:
            self._destination.remove_part(name)

    async def _fetch(self, parts: Sequence[Part], wanted: Sequence[ObjectInfo]) -> None:
        self._total = sum(map(self._size, wanted))
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
        unfinished = self._destination.parts()
        files = marker.partial.files if marker.partial is not None else {}
        for item in marker.items:
            if item.key in files:
                status = unfinished.get(files[item.key].name)
            elif item.key in here:
                status = self._destination.status(item.key)
            else:
                continue
            is_right = status is not None and status.st_size == item.size
            if not self._destination.is_locked and item.pin is not None and item.key in here:
                is_right = self._known.is_here(item)  # others may have put another version in its place
            if not is_right:
                raise DestinationError(
                    f"{self._destination.path / item.key} was changed while the other files were fetched",
                    hint="see that nobody else writes to the folder, and run the same command again",
                )
        self._destination.write(PINS_FILE, marker.to_json())
        self._tidy(marker)

    def _tidy(self, marker: PulledFolder) -> None:
        """Remove what was needed to go on. Without locks, others may still need theirs."""
        names = set(self._destination.parts()) if self._destination.is_locked else {PREVIOUS}
        names -= {file.name for file in marker.partial.files.values()} if marker.partial is not None else set()
        for name in names:
            self._destination.remove_part(name)
