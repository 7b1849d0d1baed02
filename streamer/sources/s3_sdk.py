"""``transport=sdk``: bodies through aiobotocore, under the same checks and retries as the native reader.

For set-ups the native reader does not cover, such as a TLS proxy. It costs several times the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import botocore.exceptions as aws

from streamer.config import StreamConfig
from streamer.sources.base import ObjectInfo
from streamer.sources.s3_client import S3Client, translated
from streamer.sources.s3_extras import S3Extras
from streamer.transport.checks import Expected, WrongResponse, check_range_response
from streamer.transport.failures import Place, bad_response, unavailable
from streamer.transport.pressure import Pressure
from streamer.transport.reader import read_resuming
from streamer.transport.retry import RetryPolicy
from streamer.transport.scatter import Scatter
from streamer.transport.stats import TransferStats

__all__ = ["SdkReader"]


class SdkReader:
    """Reads ranges with ``GetObject``."""

    def __init__(
        self,
        open_client: Callable[[], Awaitable[S3Client]],
        reopen: Callable[[S3Client, str], Awaitable[None]],
        config: StreamConfig,
        policy: RetryPolicy,
        stats: TransferStats,
        pressure: Pressure,
        extras: S3Extras,
    ) -> None:
        self._open_client = open_client
        self._reopen = reopen
        self._config = config
        self._policy = policy
        self._stats = stats
        self._pressure = pressure
        self._extras = extras

    async def read(
        self, bucket: str, key: str, url: str, item: ObjectInfo, start: int, buffers: Sequence[memoryview]
    ) -> None:
        """Fill `buffers`; see `streamer.sources.base.Source.read_into`."""
        scatter = Scatter(buffers)
        end = start + scatter.length

        client: S3Client | None = None

        async def try_read(position: int, scatter: Scatter, renew: bool) -> None:
            nonlocal client
            if renew and client is not None:
                await self._reopen(client, client.region)  # unless somebody else already has
            client = await self._open_client()
            await self._try(client, bucket, key, Place(url, position, end, item.version), item, scatter)

        await read_resuming(try_read, start, scatter, self._policy, self._stats, self._pressure)

    async def _try(
        self, client: S3Client, bucket: str, key: str, place: Place, item: ObjectInfo, scatter: Scatter
    ) -> None:
        assert place.start is not None
        assert place.end is not None
        pin = {} if item.pin is None else {"IfMatch": item.pin}
        if item.version is not None:
            pin["VersionId"] = item.version
        async with translated(place, anonymous=self._config.anonymous):
            response = await client.api.get_object(
                Bucket=bucket,
                Key=key,
                Range=f"bytes={place.start}-{place.end - 1}",
                **pin,
                **self._extras.for_objects,
            )
            metadata = response["ResponseMetadata"]
            headers = {name.lower(): value for name, value in metadata["HTTPHeaders"].items()}
            async with response["Body"] as body:
                try:
                    check_range_response(
                        Expected(place.start, place.end, item.size, item.pin), metadata["HTTPStatusCode"], headers
                    )
                    await self._receive(body, scatter, place)
                except WrongResponse as wrong:
                    raise bad_response(place, metadata["HTTPStatusCode"], str(wrong)) from wrong

    async def _receive(self, body: Any, scatter: Scatter, place: Place) -> None:
        # A stream that stalls raises ReadTimeoutError by the client's read_timeout; one that ends early
        # raises aiohttp's ClientPayloadError, which aiobotocore passes on as it is. One that trickles raises
        # nothing, so the rate is ours to watch.
        period = self._config.idle_timeout_seconds
        least = int(self._config.min_rate_bytes_per_second * period)
        began, before = time.monotonic(), scatter.filled
        while scatter.remaining:
            try:
                chunk: bytes = await body.read(min(scatter.remaining, 1 << 20))
            except (aiohttp.ClientError, aws.BotoCoreError, TimeoutError) as error:
                raise unavailable(place, f"the body broke off: {type(error).__name__}") from error
            if not chunk:
                raise unavailable(place, "the body ended early")
            if len(chunk) > scatter.remaining:
                raise bad_response(place, None, "the body is longer than its range")
            scatter.write(chunk)
            now = time.monotonic()
            if scatter.remaining and now - began >= period:
                arrived = scatter.filled - before
                if arrived < least:
                    raise unavailable(place, f"the response stalled: only {arrived} bytes arrived in {period:g} s")
                began, before = now, scatter.filled
