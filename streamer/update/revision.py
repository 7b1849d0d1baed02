"""`Revision`: the weights that a model has, or is to get, told so exactly that they can be read again later."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamer.artifacts.locate import Located
from streamer.config import StreamConfig
from streamer.fetch.engine import FetchEngine
from streamer.fetch.headers import OpenedCheckpoint
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.open import open_source
from streamer.sources.pinned import PinnedSource

__all__ = ["Revision", "examine"]


@dataclass(frozen=True, slots=True)
class Revision:
    """A checkpoint as it was when its headers were read.

    Attributes:
        url: where to read it.
        folder: on this machine, with at least what is not weights.
        items: its objects, pinned.
        files: keys of those that are read.
        tensors: dtype and shape of each, as the headers say, by name.
        version: what the caller calls it.
    """

    url: str
    folder: Path
    items: tuple[ObjectInfo, ...]
    files: tuple[str, ...]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    version: str | None = None

    @classmethod
    def of(cls, located: Located, engine: FetchEngine, opened: OpenedCheckpoint) -> Revision:
        """Take down what `engine` read of `located`.

        Raises:
            SourceError: a folder cannot be listed again.
        """
        items = located.items if located.items is not None else tuple(engine.loop.run(engine.source.list()))
        # What was read counts, should a file of the folder have been replaced since.
        pinned = {item.key: item for item in (*items, *opened.items)}
        return cls(
            located.url,
            located.folder,
            tuple(pinned.values()),
            tuple(item.key for item in opened.items),
            {info.name: (info.dtype, info.shape) for info in opened.checkpoint.tensors.values()},
        )

    def source(self, config: StreamConfig) -> Source:
        """Return a source of these very objects; to be opened with ``only=revision.files``."""
        return PinnedSource(open_source(self.url, config), self.items)

    def named(self, version: str | None) -> Revision:
        """Return the same under another version's name."""
        return dataclasses.replace(self, version=version)

    def is_same(self, other: Revision) -> bool:
        """Whether both are read from the same objects, unchanged."""
        return self.digest() == other.digest()

    def digest(self) -> bytes:
        """Return what is equal on ranks that are about to read the same."""
        wanted = set(self.files)
        pins = sorted([item.key, item.size, item.pin, item.version] for item in self.items if item.key in wanted)
        return hashlib.sha256(json.dumps([self.url, self.files, pins]).encode()).digest()


def examine(source: Source, located: Located, config: StreamConfig, *, only: Sequence[str] = ()) -> Revision:
    """Read the headers of `located`, and nothing else.

    Args:
        source: closed when this returns.
        only: keys of the files to read, instead of choosing them.

    Raises:
        CheckpointError, SourceError: see `streamer.errors`.
    """
    with FetchEngine(source, config) as engine:
        return Revision.of(located, engine, engine.open_checkpoint(only=only))
