"""Google Cloud Storage.

Its JSON API lists and looks up (`streamer.sources.gcs_client`); bodies come through our own reader from the same API,
with a bearer token. Every object of GCS has a generation, a number that changes with its content
(https://cloud.google.com/storage/docs/metadata#generation-number): every read names the one that was listed and is
refused if it is not there any more. Where the bucket keeps replaced objects, such a read gets what was listed.

An object with a Content-Encoding is listed with the size of what is stored, decompressed on its way by default, and
then sent whole whatever range was asked for (https://cloud.google.com/storage/docs/transcoding). So reads ask for what
is stored, and such objects are refused by name: neither weights nor what engines read from files may be encoded.
"""

from __future__ import annotations

import base64
import binascii
import functools
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from streamer.checkpoint.stored import StoredChecksum, StoredPart
from streamer.config import StreamConfig
from streamer.errors import (
    BadResponseError,
    ConfigError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
    shorten,
)
from streamer.sources.base import Listing, ObjectInfo
from streamer.sources.gcs_client import GcsClient
from streamer.sources.gcs_errors import refused_by_gcs
from streamer.sources.gcs_url import GcsLocation
from streamer.transport.failures import Place
from streamer.transport.hedging import Hedging
from streamer.transport.lanes import Lanes
from streamer.transport.pool import parse_origin
from streamer.transport.pressure import Pressure
from streamer.transport.reader import Address, RangeReader, ReadTarget
from streamer.transport.retry import RetryPolicy
from streamer.transport.stats import TransferStats

__all__ = ["GcsSource"]

_GENERATION_HEADER = "x-goog-generation"
_FIELDS = "name,size,generation,contentEncoding"
_PAGE = 1000  # the most that GCS gives


class GcsSource:
    """The objects below one prefix of a bucket.

    Args:
        location: bucket and prefix.
        config: endpoint, identity, retries.

    Raises:
        ConfigError: an option that is S3's alone, or an endpoint, bundle or proxy that cannot be used.
    """

    def __init__(self, location: GcsLocation, config: StreamConfig) -> None:
        if config.transport == "sdk":
            raise ConfigError(f"{location.url} cannot be read with transport=sdk", hint="only s3:// URLs have an SDK")
        if config.sse_customer_key_file:
            raise ConfigError(
                f"{location.url} cannot be read with sse_customer_key_file", hint="customers' keys are only sent to S3"
            )
        self._location = location
        self._config = config
        self._policy = RetryPolicy.from_config(config)
        self._pressure = Pressure(config)
        self._stats = TransferStats()
        self._hedging = Hedging(config, self._stats, self._pressure)
        self._client = GcsClient(config, location.url)
        self._lanes: Lanes | None = None
        self._reader: RangeReader | None = None
        self._encodings: dict[tuple[str, str | None], str] = {}

    def __repr__(self) -> str:
        return f"<GcsSource {self.url}>"

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def stats(self) -> TransferStats:
        return self._stats

    def label(self, key: str) -> str:
        return self.url + key

    # -- control plane -------------------------------------------------------------------------------

    async def list_below(self, prefix: str, *, recursive: bool) -> Listing:
        found: list[ObjectInfo] = []
        folders: list[str] = []
        seen: set[str] = set()
        token = ""
        wanted = {"fields": f"nextPageToken,prefixes,items({_FIELDS})"}
        if not recursive:
            wanted["delimiter"] = "/"
        while True:
            # Pages may be empty, and yet there are more.
            page = await self._page(self._location.prefix + prefix, token, **wanted)
            folders += [str(folder).removeprefix(self._location.prefix) for folder in page.get("prefixes", ())]
            for item in _listed(page, "items", self.url):
                key = str(item.get("name", "")).removeprefix(self._location.prefix)
                if key and not key.endswith("/"):  # the rest are folder markers
                    found.append(self._info(key, item))
            token = str(page.get("nextPageToken") or "")
            if not token:
                break
            if token in seen:
                raise BadResponseError("the listing has no end: it continues where it has been before", url=self.url)
            seen.add(token)
        return Listing(found, folders)

    async def list(self) -> Sequence[ObjectInfo]:
        found = (await self.list_below("", recursive=True)).items
        if not found:
            raise ObjectNotFoundError("there are no objects here", hint=await self._suggest(), url=self.url)
        return found

    async def _page(self, prefix: str, token: str, **parameters: str) -> dict[str, Any]:
        query = {"prefix": prefix, "maxResults": str(_PAGE), **parameters}
        if token:
            query["pageToken"] = token
        return await self._client.get(Place(self.url), self._location.listing_path, query)

    async def _suggest(self) -> str:
        """Look for what the user may have meant; only on the way to an error."""
        try:
            page = await self._page(self._location.prefix.rstrip("/"), "", delimiter="/", maxResults="20")
        except SourceError:
            page = {}  # the first error is the one that counts
        names = [str(prefix) for prefix in page.get("prefixes", ())]
        names += [str(item.get("name")) for item in _listed(page, "items", self.url)]
        near = [f"gs://{self._location.bucket}/{name}" for name in names if name != self._location.prefix]
        return f"there is {shorten(near, 4)}" if near else "check the bucket and the prefix"

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        return self._info(key, await self._look(key, version, _FIELDS))

    async def _look(self, key: str, generation: str | None, fields: str) -> dict[str, Any]:
        chosen = {} if generation is None else {"generation": generation}
        place = Place(self.label(key), version=generation)
        return await self._client.get(place, self._location.object_path(key), {"fields": fields, **chosen})

    def _info(self, key: str, item: dict[str, Any]) -> ObjectInfo:
        try:
            size, generation = int(item["size"]), str(int(item["generation"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BadResponseError("the store tells no size and generation", url=self.label(key)) from error
        encoding = str(item.get("contentEncoding") or "").strip().lower()
        if encoding not in ("", "identity"):
            self._encodings[key, generation] = encoding
        return ObjectInfo(key, size, generation, generation if self._config.pin == "version" else None)

    async def stored_checksum(self, item: ObjectInfo) -> StoredChecksum:
        look = await self._look(item.key, item.version, f"{_FIELDS},crc32c")
        if self._info(item.key, look) != item:
            raise ObjectChangedError(
                "the object changed during the load", url=self.label(item.key), hint="load again when nobody writes"
            )
        if "crc32c" not in look:  # it may be left out of objects that a customer's own key encrypts
            return StoredChecksum(None, why_not="the store tells no checksum of it")
        try:
            digest = base64.b64decode(look["crc32c"], validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise BadResponseError("its checksum is not in base64", url=self.label(item.key)) from error
        return StoredChecksum("CRC32C", (StoredPart(0, item.size, digest),))

    # -- data plane ----------------------------------------------------------------------------------

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        encoding = self._encodings.get((item.key, item.pin))
        if encoding is not None:
            raise SourceError(
                f"it is stored with Content-Encoding: {encoding}, so that its bytes are not those of the file",
                hint="upload it again without compression (gcloud storage cp without --gzip-local)",
                url=self.label(item.key),
            )
        await self._hedging.read(functools.partial(self._read, item), start, buffers)

    async def _read(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        if self._reader is None:
            self._lanes = self._client.open_lanes()
            self._reader = RangeReader(self._lanes, self._config, self._policy, self._stats, self._pressure)
        query = {"alt": "media", **await self._client.payer()}
        if item.pin is not None:
            query |= {"generation": item.pin, "ifGenerationMatch": item.pin}
        path = f"/download{self._location.object_path(item.key)}?{urlencode(query)}"
        origin, request_target = parse_origin(self._client.endpoint + path, self._client.proxy)

        async def address(expired: Address | None) -> Address:
            headers = await self._client.identity.headers(dict(expired.headers) if expired is not None else None)
            return Address(origin, request_target, headers=tuple(headers.items()), accept_encoding="gzip")

        target = ReadTarget(
            self.label(item.key),
            item.size,
            None,
            address,
            anonymous=self._client.identity.is_anonymous,
            version=item.version,
            identity=None if item.pin is None else (_GENERATION_HEADER, item.pin),
            refused=refused_by_gcs,
        )
        await self._reader.read(target, start, buffers)

    async def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
        await self._client.close()


def _listed(page: dict[str, Any], name: str, url: str) -> Sequence[dict[str, Any]]:
    listed = page.get(name, [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise BadResponseError("the store did not answer in the form of GCS's JSON API", url=url)
    return listed
