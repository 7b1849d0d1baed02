"""S3 and stores that speak its protocol.

aiobotocore lists, heads and signs; bodies come through our own reader (`streamer.transport`) from
presigned URLs, one per object, because signing and receiving through the SDK costs four times the CPU.
"""

from __future__ import annotations

import asyncio
import functools
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from streamer.checkpoint.stored import StoredChecksum
from streamer.config import StreamConfig
from streamer.errors import BadResponseError, ConfigError, ObjectNotFoundError, SourceError, shorten
from streamer.sources.base import Listing, ObjectInfo
from streamer.sources.network import ssl_context_for
from streamer.sources.s3_checksums import ask_checksum
from streamer.sources.s3_client import S3Client, open_s3_client, translated
from streamer.sources.s3_extras import S3Extras
from streamer.sources.s3_sdk import SdkReader
from streamer.sources.s3_url import S3Location
from streamer.sources.s3_versions import resolve_versions, version_of
from streamer.transport.failures import CredentialsExpired, Place, WrongRegion, unavailable
from streamer.transport.hedging import Hedging
from streamer.transport.lanes import Lanes, open_lanes
from streamer.transport.pool import parse_origin
from streamer.transport.pressure import Pressure
from streamer.transport.reader import Address, RangeReader, ReadTarget
from streamer.transport.retry import Attempts, RetryPolicy, call_with_retries
from streamer.transport.stats import TransferStats

__all__ = ["S3Source"]

T = TypeVar("T")

#: A signed URL is replaced this long after signing at the latest. botocore refreshes credentials at
#: least ten minutes before they expire, so a URL younger than this never outlives them.
_RENEW_AFTER_SECONDS = 300.0
#: The same for a directory bucket, whose sessions botocore replaces ten seconds before they expire.
_RENEW_SESSION_AFTER_SECONDS = 10.0


class S3Source:
    """The objects below one prefix of a bucket.

    Args:
        location: bucket and prefix.
        config: endpoint, identity, transport, retries.
        clock: seconds, monotonic.
    """

    def __init__(
        self, location: S3Location, config: StreamConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._location = location
        self._config = config
        self._clock = clock
        self._policy = RetryPolicy.from_config(config)
        self._pressure = Pressure(config)
        self._extras = S3Extras(config)
        self._stats = TransferStats()
        self._hedging = Hedging(config, self._stats, self._pressure)
        self._opening = asyncio.Lock()
        self._client: S3Client | None = None
        self._retired: list[S3Client] = []
        self._lanes: Lanes | None = None
        self._reader: RangeReader | None = None
        self._addresses: dict[tuple[str, str | None], tuple[Address, float]] = {}
        life = _RENEW_SESSION_AFTER_SECONDS if location.is_directory else _RENEW_AFTER_SECONDS
        self._address_life = min(life, config.presign_seconds / 2)

    def __repr__(self) -> str:
        return f"<S3Source {self.url}>"

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def stats(self) -> TransferStats:
        return self._stats

    @property
    def region(self) -> str | None:
        """Where requests go now, which may be where the store said the bucket is; None before the first."""
        return self._client.region if self._client is not None else None

    def label(self, key: str) -> str:
        return self.url + key

    # -- control plane -------------------------------------------------------------------------------

    async def list_below(self, prefix: str, *, recursive: bool) -> Listing:
        found: list[ObjectInfo] = []
        folders: list[str] = []
        seen: set[str] = set()
        token: str | None = None
        stop = {} if recursive else {"Delimiter": "/"}
        while True:
            page = await self._page(self._location.prefix + prefix, token, **stop)
            folders += [item["Prefix"].removeprefix(self._location.prefix) for item in page.get("CommonPrefixes", ())]
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._location.prefix)
                if key and not key.endswith("/"):  # the rest are folder markers
                    found.append(ObjectInfo(key, item["Size"], _pin(item.get("ETag"))))
            token = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                break
            if token in seen:
                raise BadResponseError("the listing has no end: it continues where it has been before", url=self.url)
            seen.add(token)
        return Listing(found, folders)

    async def list(self) -> Sequence[ObjectInfo]:
        found = (await self.list_below("", recursive=True)).items
        if not found:
            raise ObjectNotFoundError("there are no objects here", hint=await self._suggest(), url=self.url)
        if any(item.pin is None for item in found):
            warnings.warn(
                f"{self.url}: the store gives no strong ETags, so a change during the load cannot be noticed",
                stacklevel=2,
            )
        if self._config.pin == "version":
            return await resolve_versions(found, self.stat, label=self.label, concurrency=self._config.concurrency)
        return found

    async def _page(self, prefix: str, token: str | None, **options: Any) -> dict[str, Any]:
        arguments = {"Bucket": self._location.bucket, "Prefix": prefix, **self._extras.for_listing, **options}
        if token:
            arguments["ContinuationToken"] = token

        async def fetch(client: S3Client) -> dict[str, Any]:
            page: dict[str, Any] = await client.api.list_objects_v2(**arguments)
            return page

        page = await self._call(self.url, fetch, action=f"s3:ListBucket on the bucket for the prefix {prefix!r}")
        await self._follow_region(page["ResponseMetadata"].get("HTTPHeaders", {}).get("x-amz-bucket-region"))
        return page

    async def _suggest(self) -> str:
        """Look for what the user may have meant; only on the way to an error."""
        prefix = self._location.prefix.rstrip("/")
        if self._location.is_directory:  # which lists folders only
            prefix = prefix[: prefix.rfind("/") + 1]
        try:
            page = await self._page(prefix, None, Delimiter="/", MaxKeys=20)
        except SourceError:
            page = {}  # the identity may list only below the prefix; the first error is the one that counts
        near = [f"s3://{self._location.bucket}/{item['Prefix']}" for item in page.get("CommonPrefixes", ())]
        near += [f"s3://{self._location.bucket}/{item['Key']}" for item in page.get("Contents", ())]
        return f"there is {shorten(near, 4)}" if near else "check the bucket and the prefix"

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        chosen = {} if version is None else {"VersionId": version}

        async def fetch(client: S3Client) -> dict[str, Any]:
            head: dict[str, Any] = await client.api.head_object(
                Bucket=self._location.bucket, Key=self._location.prefix + key, **chosen, **self._extras.for_objects
            )
            return head

        # Of an object that is not there, S3 says so only to those who may list.
        action = "s3:GetObject (and s3:ListBucket, without which what is missing is denied too)"
        head = await self._call(self.label(key), fetch, version, action if version is None else None)
        if version is None and self._config.pin == "version":
            version = version_of(head, self.label(key))
        return ObjectInfo(key, head["ContentLength"], _pin(head.get("ETag")), version)

    async def stored_checksum(self, item: ObjectInfo) -> StoredChecksum:
        chosen = {} if item.version is None else {"VersionId": item.version}
        where = {
            "Bucket": self._location.bucket,
            "Key": self._location.prefix + item.key,
            **chosen,
            **self._extras.for_objects,
        }
        label = self.label(item.key)
        return await self._call(label, lambda client: ask_checksum(client.api, where, item, label), item.version)

    async def put(self, key: str, body: bytes) -> None:
        """Write one object, replacing what is there."""

        async def send(client: S3Client) -> None:
            await client.api.put_object(
                Bucket=self._location.bucket, Key=self._location.prefix + key, Body=body, **self._extras.for_objects
            )

        await self._call(self.label(key), send, action="s3:PutObject")

    async def _call(
        self,
        url: str,
        operation: Callable[[S3Client], Awaitable[T]],
        version: str | None = None,
        action: str | None = None,
    ) -> T:
        """Run a control-plane call under the retry policy, renewing credentials or the region once."""
        place = Place(url, version=version, action=action)
        limit = self._config.retry_deadline_seconds
        mended = False

        async def attempt(_: Attempts) -> T:
            nonlocal mended
            while True:
                client = await self._open()
                try:
                    # The SDK's timeout is for the next bytes, however few; this is for the whole answer.
                    async with asyncio.timeout(limit), translated(place, anonymous=self._config.anonymous):
                        return await operation(client)
                except TimeoutError:
                    raise unavailable(place, f"the answer was not complete within {limit:g} s") from None
                except CredentialsExpired as expired:
                    if mended:
                        raise expired.final from None
                    await self._reopen(client, client.region)
                except WrongRegion as wrong:
                    if mended or not wrong.region or self._config.region:
                        raise
                    await self._reopen(client, wrong.region)
                mended = True

        return await call_with_retries(attempt, self._policy)

    async def _open(self) -> S3Client:
        if self._client is None:
            async with self._opening:
                if self._client is None:
                    self._client = await open_s3_client(self._config, self._location)
        return self._client

    async def _reopen(self, old: S3Client, region: str) -> None:
        """Replace `old` unless somebody already has; whatever was signed with it is forgotten."""
        async with self._opening:
            if self._client is old:
                self._client = await open_s3_client(self._config, self._location, region=region)
                self._retired.append(old)
                self._addresses.clear()

    async def _follow_region(self, region: str | None) -> None:
        if self._location.is_directory or self._location.is_multi_region:
            return  # one has its zone's endpoint, the other none of a region
        client = self._client
        if client is not None and region and region != client.region and not self._config.region:
            await self._reopen(client, region)

    # -- data plane ----------------------------------------------------------------------------------

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        await self._hedging.read(functools.partial(self._read, item), start, buffers)

    async def _read(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        if item.version is None and self._config.pin == "version":
            raise ConfigError(
                f"{self.label(item.key)} was resolved without its version, and pin=version asks for one",
                hint="set pin=version for every process of the load, or for none",
            )
        client = await self._open()
        if self._config.transport == "sdk":
            reader = SdkReader(
                self._open, self._reopen, self._config, self._policy, self._stats, self._pressure, self._extras
            )
            await reader.read(
                self._location.bucket, self._location.prefix + item.key, self.label(item.key), item, start, buffers
            )
            return
        if self._reader is None:
            is_secure = client.api.meta.endpoint_url.startswith("https:")
            self._lanes = open_lanes(self._config, ssl_context_for(client.verify) if is_secure else None)
            self._reader = RangeReader(self._lanes, self._config, self._policy, self._stats, self._pressure)

        async def address(expired: Address | None) -> Address:
            return await self._address(item, expired)

        target = ReadTarget(self.label(item.key), item.size, item.pin, address, self._config.anonymous, item.version)
        await self._reader.read(target, start, buffers)

    async def _address(self, item: ObjectInfo, expired: Address | None) -> Address:
        """Return the signed address of `item`, signing it at most once in its life.

        Args:
            expired: what the store refused. Credentials are looked up anew, once for all who ask.
        """
        known = self._addresses.get((item.key, item.version))
        if known is not None and known[0] is not expired and self._clock() < known[1]:
            return known[0]
        client = await self._open()
        if expired is not None and expired.signer is client:
            await self._reopen(client, client.region)
            client = await self._open()
        chosen = {} if item.version is None else {"VersionId": item.version}
        async with translated(Place(self.label(item.key)), anonymous=self._config.anonymous):
            url = await client.api.generate_presigned_url(
                "get_object",
                Params={
                    "Bucket": self._location.bucket,
                    "Key": self._location.prefix + item.key,
                    **chosen,
                    **self._extras.for_objects,
                },
                ExpiresIn=self._config.presign_seconds,
            )
        origin, target = parse_origin(url, client.proxy)
        address = Address(origin, target, client, self._extras.headers_for(url))
        self._addresses[item.key, item.version] = (address, self._clock() + self._address_life)
        return address

    async def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
        clients, self._client = [*self._retired, *([self._client] if self._client else [])], None
        self._retired = []
        for client in clients:
            await client.stack.aclose()


def _pin(etag: str | None) -> str | None:
    """Return what ``If-Match`` can be given: it never matches a weak ETag (RFC 9110, section 13.1.1)."""
    return None if not etag or etag.startswith("W/") else etag
