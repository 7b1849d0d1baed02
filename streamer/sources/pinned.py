"""A source whose listing is known already."""

from __future__ import annotations

from collections.abc import Sequence

from streamer.errors import ObjectChangedError, ObjectNotFoundError
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.wrapper import SourceWrapper

__all__ = ["PinnedSource", "confirm"]


async def confirm(source: Source, item: ObjectInfo) -> None:
    """Look at `item`, which somebody else listed, once: for what only the store's answers tell, such as its region
    and whether we may read.

    Raises:
        ObjectChangedError: it was replaced or deleted since.
        SourceError: see `streamer.errors`.
    """
    try:
        now = await source.stat(item.key, item.version)
    except ObjectNotFoundError as error:
        raise ObjectChangedError(
            "the object was deleted since the model was resolved",
            url=source.label(item.key),
            status=error.status,
            code=error.code,
            request_id=error.request_id,
            hint="start again, with what is there now",
        ) from error
    if (now.size, now.pin) != (item.size, item.pin):
        raise ObjectChangedError(
            "the object was replaced since the model was resolved",
            url=source.label(item.key),
            hint="start again, to load the new version everywhere",
        )


class PinnedSource(SourceWrapper):
    """`source` as somebody listed it before, in another process perhaps, or part of it.

    Nothing is listed again, so that all ranks of a load read the very same objects, whatever happens to
    the prefix meanwhile: what was replaced since fails with `ObjectChangedError`, or is read as it was, if the
    items have versions.

    Args:
        source: closed with this one.
        items: its objects, with their pins.
    """

    def __init__(self, source: Source, items: Sequence[ObjectInfo]) -> None:
        super().__init__(source)
        self._items = {item.key: item for item in items}

    async def list(self) -> Sequence[ObjectInfo]:
        items = list(self._items.values())
        if items:
            await confirm(self._source, items[0])
        return items

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        if key not in self._items:
            raise ObjectNotFoundError("it was not there when the model was resolved", url=self.label(key))
        return self._items[key]
