"""``pin=version``: from the latest objects to versions that stay, whatever replaces them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from streamer.errors import ConfigError, ObjectChangedError, ObjectNotFoundError
from streamer.sources.base import ObjectInfo
from streamer.sources.tasks import FlatTaskGroup

__all__ = ["resolve_versions", "version_of"]


def version_of(head: Mapping[str, Any], url: str) -> str:
    """Return the version that a HEAD names.

    Raises:
        ConfigError: it names none, or the one that the next upload replaces, whose id is ``null``
            (https://docs.aws.amazon.com/AmazonS3/latest/userguide/versioning-workflows.html).
    """
    version = head.get("VersionId")
    if not version or version == "null":
        raise ConfigError(
            f"{url} has no version to pin, and pin=version asks for one",
            hint="turn on the bucket's versioning and upload the objects again, or set pin=etag",
        )
    return str(version)


async def resolve_versions(
    items: Sequence[ObjectInfo],
    stat: Callable[[str], Awaitable[ObjectInfo]],
    *,
    label: Callable[[str], str],
    concurrency: int,
) -> list[ObjectInfo]:
    """Give each of `items` its version, which listings of S3 do not tell.

    Args:
        stat: looks up one object, with its version.
        concurrency: look-ups at once.

    Raises:
        ObjectChangedError: an object is another one, or gone, since it was listed.
    """
    gate = asyncio.Semaphore(concurrency)

    async def resolve(item: ObjectInfo) -> ObjectInfo:
        async with gate:
            try:
                found = await stat(item.key)
            except ObjectNotFoundError as error:
                raise _changed(label(item.key), "deleted") from error
        if (found.size, found.pin) != (item.size, item.pin):
            raise _changed(label(item.key), "replaced")
        return found

    async with FlatTaskGroup() as group:
        tasks = [group.create_task(resolve(item)) for item in items]
    return [task.result() for task in tasks]


def _changed(url: str, how: str) -> ObjectChangedError:
    return ObjectChangedError(
        f"the object was {how} while the model was resolved", url=url, hint="start again, when nobody writes to it"
    )
