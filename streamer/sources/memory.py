"""Objects held in memory: for tests, and for checkpoints that were made in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamer.errors import ObjectChangedError, ObjectNotFoundError
from streamer.sources.base import ObjectInfo
from streamer.transport.stats import TransferStats

__all__ = ["MemorySource"]


class MemorySource:
    """A mapping of keys to bytes. Replacing a value is noticed by reads that were pinned before."""

    def __init__(self, objects: Mapping[str, bytes], name: str = "objects") -> None:
        self._objects = objects
        self._name = name
        self._stats = TransferStats()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def stats(self) -> TransferStats:
        return self._stats

    def label(self, key: str) -> str:
        return f"{self.url}/{key}"

    async def list(self) -> Sequence[ObjectInfo]:
        if not self._objects:
            raise ObjectNotFoundError("there are no objects here", url=self.url)
        return [self._info(key, body) for key, body in self._objects.items()]

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        if key not in self._objects:
            raise ObjectNotFoundError("no such object", url=self.label(key))
        return self._info(key, self._objects[key])

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        end = start + sum(map(len, buffers))
        self._stats.requests += 1
        body = self._objects.get(item.key)
        if body is None or self._info(item.key, body).pin != item.pin:
            raise ObjectChangedError(
                "the object changed during the load", url=self.label(item.key), start=start, end=end
            )
        rest = memoryview(body)[start:end]
        for buffer in buffers:
            buffer[:] = rest[: len(buffer)]
            rest = rest[len(buffer) :]
        self._stats.note_bytes(end - start)

    async def close(self) -> None:
        pass

    @staticmethod
    def _info(key: str, body: bytes) -> ObjectInfo:
        # bytes are immutable, so identity is a pin for as long as the mapping holds the object
        return ObjectInfo(key, len(body), f"{id(body):x}-{len(body)}")
