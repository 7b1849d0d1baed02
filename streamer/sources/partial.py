"""A local folder that holds only what some ranks need of its weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from streamer.checkpoint.partial import PINS_FILE, WORK_FOLDER, Partial, PartialFile
from streamer.errors import ConfigError, NotFetchedError, ObjectChangedError, ObjectNotFoundError
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.wrapper import SourceWrapper

__all__ = ["PartialSource", "find_partial", "leading_bytes", "partial_of"]


def find_partial(folder: Path) -> Partial | None:
    """Return what the marker of `folder` says of files that are not whole, or None.

    A marker that cannot be read is no marker here: without one these files have no names, so that nobody reads them.

    Raises:
        ConfigError: there are such files, and the marker is damaged.
    """
    try:
        document = json.loads((folder / PINS_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("partial") is None:
        return None
    try:
        return Partial.from_document(document["partial"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / PINS_FILE} is damaged, or was not written by this version of s3stream ({error})",
            hint="run the `s3stream fetch` again that filled the folder",
        ) from error


class PartialSource(SourceWrapper):
    """`source` with the files of `partial` under their keys; of these, only what was fetched can be read.

    Args:
        source: the folder; closed with this one.
    """

    def __init__(self, source: Source, partial: Partial) -> None:
        super().__init__(source)
        self.partial = partial

    async def list(self) -> Sequence[ObjectInfo]:
        whole = [
            item
            for item in await self._source.list()
            if item.key not in self.partial.files and not item.key.startswith(f"{WORK_FOLDER}/")
        ]
        return [*whole, *[await self.stat(key) for key in self.partial.files]]

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        file = self.partial.files.get(key)
        if file is None:
            return await self._source.stat(key, version)
        try:
            found = await self._source.stat(_key(file), version)
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(
                f"it was fetched for {self.partial}, and what was fetched is not there any more",
                url=self.label(key),
                hint="run the same `s3stream fetch` again",
            ) from error
        if found.size != file.size:
            raise ObjectChangedError(
                f"what was fetched of it has {found.size} bytes, not {file.size}",
                url=self.label(key),
                hint="empty the folder, and run the same `s3stream fetch` again",
            )
        return dataclasses.replace(found, key=key)

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        file = self.partial.files.get(item.key)
        if file is None:
            await self._source.read_into(item, start, buffers)
            return
        end = start + sum(map(len, buffers))
        if not file.holds(start, end):
            raise NotFetchedError(
                f"these bytes were not fetched: the folder holds only what {self.partial} needs",
                url=self.label(item.key),
                start=start,
                end=end,
                hint="load such a rank, by the same engine, with the options of the fetch and a traced mode; or fetch "
                "for this one too, or with --mode all",
            )
        await self._source.read_into(dataclasses.replace(item, key=_key(file)), start, buffers)


def _key(file: PartialFile) -> str:
    return f"{WORK_FOLDER}/{file.name}"


def partial_of(source: Source) -> Partial | None:
    """Return which files of `source`, wrapped or not, are not whole; None when all are."""
    while not isinstance(source, PartialSource):
        if not isinstance(source, SourceWrapper):
            return None
        source = source.inner
    return source.partial


def leading_bytes(source: Source, item: ObjectInfo) -> int:
    """Return how many bytes of a file, from its first on, can be read at once."""
    partial = partial_of(source)
    file = None if partial is None else partial.files.get(item.key)
    return item.size if file is None else next((end for start, end in file.spans if start == 0), 0)
