"""What a load does with a source, once each: list, head, read a range, pin it, parse a header."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from streamer.checkpoint.index import MAX_INDEX_BYTES, Index, parse_index
from streamer.checkpoint.select import Listed, choose_index, select_files
from streamer.config import StreamConfig
from streamer.doctor.checks import Finding
from streamer.errors import (
    AccessDeniedError,
    BadResponseError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
)
from streamer.fetch.headers import read_checkpoint, read_object
from streamer.sources import ObjectInfo, Source
from streamer.sources.s3 import S3Source
from streamer.sources.tasks import FlatTaskGroup

__all__ = ["Access"]

#: What checkpoints have: looked for when listing is not allowed.
_USUAL_KEYS = ("model.safetensors.index.json", "model.safetensors", "config.json")
_RANGE_BYTES = 64 << 10
#: How much is read, and how long, for an idea of the speed.
_LEAST_HINT_BYTES, _HINT_BYTES, _HINT_SECONDS, _HINT_READS = 64 << 10, 64 << 20, 2.0, 8


class Access:
    """The checks of a source of any kind; each needs those before it.

    Args:
        key: of the one file that the URL names, if it names one.
        region: that requests begin in, of S3.
        advice: what else to try if there is no such bucket.
    """

    def __init__(
        self,
        source: Source,
        config: StreamConfig,
        key: str | None,
        region: str | None = None,
        advice: str | None = None,
    ) -> None:
        self._source = source
        self._config = config
        self._key = key
        self._region = region
        self._advice = advice
        self._listing: Sequence[ObjectInfo] = ()
        self._index: Index | None = None
        self._item: ObjectInfo | None = None

    @property
    def item(self) -> ObjectInfo:
        """What is read: weights, where there are any; known after `head`."""
        assert self._item is not None
        return self._item

    async def list(self) -> Finding:
        try:
            self._listing = await self._source.list()
        except ObjectNotFoundError as error:
            if error.code == "NoSuchBucket" and self._advice:
                error.hint = f"{error.hint}; {self._advice}"
            raise
        text = f"{_counted(len(self._listing), 'object')}, {sum(item.size for item in self._listing)} bytes"
        region = self._source.region if isinstance(self._source, S3Source) else None
        if region != self._region:
            return Finding(f"{text}, in {region}", f"set region={region}, which saves asking elsewhere first")
        return Finding(text)

    async def head(self) -> Finding:
        """Look at one object: the one that was asked for, or the first weights of the listing."""
        keys = [self._key] if self._key else [self._pick()] if self._listing else list(_USUAL_KEYS)
        denied: SourceError | None = None
        for key in keys:
            try:
                self._item = await self._source.stat(key)
                break
            except AccessDeniedError as error:
                denied = denied or error
            except ObjectNotFoundError:
                if key == keys[-1] and denied is None:
                    raise
        if self._item is None:
            assert denied is not None
            raise denied
        item = self._item
        listed = next((one for one in self._listing if one.key == item.key), item)
        if (listed.size, listed.pin) != (item.size, item.pin):
            raise ObjectChangedError(
                f"the listing says {listed.size} bytes and {listed.pin}, the object itself {item.size} and {item.pin}",
                url=self._source.label(item.key),
                hint="look again when nobody writes to it; if it stays, the store contradicts itself",
            )
        return Finding(f"{item.key}: {item.size} bytes, {'pin ' + item.pin if item.pin else 'no pin'}")

    def _pick(self) -> str:
        """The largest weights, else the largest object."""
        return max(self._listing, key=lambda item: (item.key.endswith(".safetensors"), item.size)).key

    async def read(self) -> Finding:
        """Read a range from inside the object, which nobody can mistake for all of it."""
        item = self.item
        start = item.size // 3
        count = min(_RANGE_BYTES, max(item.size - start - 1, min(item.size, 1)))
        if not count:
            return Finding(f"{item.key} is empty, so there is no range to read", "look at a folder with weights")
        began = time.perf_counter()
        await self._source.read_into(item, start, [memoryview(bytearray(count))])
        milliseconds = (time.perf_counter() - began) * 1e3
        return Finding(f"bytes {start}-{start + count - 1} of {item.key}, and no others, in {milliseconds:.1f} ms")

    async def pin(self) -> Finding:
        """Ask for content that is not there: a store that answers could not tell us of a replaced object."""
        item = self.item
        if item.pin is None:
            return Finding(
                "the store gives no strong identity, so objects that are replaced during a load are not noticed",
                "write nothing under a model's prefix while it loads; integrity=manifest finds what changed",
            )
        wrong = dataclasses.replace(item, pin='"00000000000000000000000000000000"', version=None)
        config = self._config
        if config.pin == "version":
            return Finding(f"pinned to version {item.version}")
        try:
            await self._source.read_into(wrong, 0, [memoryview(bytearray(min(item.size, 1)))])
        except ObjectChangedError as error:
            return Finding(f"a read of other content is refused{f' ({error.status})' if error.status else ''}")
        except BadResponseError:
            return Finding(
                "the store ignores If-Match, and its answers name the object's ETag, by which changes are noticed",
                "nothing need be done; a store that honours If-Match would refuse sooner",
            )
        return Finding(
            "the store ignores If-Match and names no ETag in its answers, so a replaced object is not noticed",
            "write nothing under a model's prefix while it loads; integrity=manifest finds what changed",
        )

    async def checkpoint(self) -> Finding:
        """Choose the weights as a load does, and parse one file's header."""
        source, config = self._source, self._config
        keys, text = [self.item.key], "one file"
        if self._listing:
            listing = [Listed(item.key, item.size) for item in self._listing]
            index_key = None if config.index == "ignore" else choose_index(listing)
            if index_key is not None:
                found = next(item for item in self._listing if item.key == index_key)
                body = await read_object(source, found, limit_bytes=MAX_INDEX_BYTES)
                self._index = parse_index(index_key, body, source.label(index_key))
            weights = select_files(source.url, listing, self._index).weights
            keys = [file.key for file in weights]
            text = f"{_counted(len(keys), 'file')} of weights, {sum(file.size for file in weights)} bytes"
            text += ", with an index" if self._index is not None else ""
        first = (await read_checkpoint(source, config, only=keys[:1])).checkpoint
        dtypes = sorted({info.dtype for info in first.tensors.values()})
        return Finding(f"{text}; {keys[0]} holds {_counted(len(first.tensors), 'tensor')} ({', '.join(dtypes)})")

    async def throughput(self) -> Finding:
        """Read for a moment, for the order of magnitude."""
        item, size = self.item, min(self._config.request_bytes, self.item.size)
        if size < _LEAST_HINT_BYTES:
            return Finding(f"{item.size} bytes are too few to tell")
        starts = iter(range(0, min(item.size - size + 1, _HINT_BYTES), size))
        reads = min(self._config.concurrency, _HINT_READS)
        began, nbytes = time.perf_counter(), 0

        async def keep_reading() -> None:
            nonlocal nbytes
            buffer = bytearray(size)
            for start in starts:
                await self._source.read_into(item, start, [memoryview(buffer)])
                nbytes += size
                if time.perf_counter() - began > _HINT_SECONDS:
                    break

        async with FlatTaskGroup() as group:
            for _ in range(reads):
                group.create_task(keep_reading())
        rate = nbytes / (time.perf_counter() - began)
        return Finding(f"about {rate / 1e6:.0f} MB/s from {nbytes} bytes; `s3stream bench` measures it")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
