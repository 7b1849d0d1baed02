"""`RangeReader`: one byte range of one object into given memory, resumed and retried until it is right."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from streamer.config import StreamConfig
from streamer.errors import SourceError
from streamer.transport.checks import (
    Expected,
    WrongResponse,
    check_range_response,
    parse_store_error,
    retry_after,
)
from streamer.transport.connection import ConnectionDropped, HttpConnection, ResponseStalled
from streamer.transport.failures import CredentialsExpired, Place, bad_response, classify, unavailable
from streamer.transport.head import MalformedResponse, ResponseHead
from streamer.transport.lanes import Lanes
from streamer.transport.pool import ConnectFailed, ConnectionPool, Origin
from streamer.transport.pressure import Pressure
from streamer.transport.retry import Attempts, RetryPolicy, TransientFailure, call_with_retries
from streamer.transport.scatter import Scatter
from streamer.transport.stats import TransferStats

__all__ = ["Address", "RangeReader", "ReadTarget", "Refused", "read_resuming"]

#: A failed try that delivered this much counts as progress.
_PROGRESS_BYTES = 256 << 10
_ASKED_TOO_MUCH = (429, 503)

#: From a place, head and body of an answer, and whether the request was anonymous, to what to raise for it.
Refused: TypeAlias = Callable[[Place, ResponseHead, bytes, bool], Exception]


@dataclass(frozen=True, slots=True)
class Address:
    """Where to ask for an object.

    Attributes:
        request_target: may carry a signature, so it is never shown.
        signer: who signed it; the source's own.
        headers: that are part of the signature, or are the credentials. They are never shown.
        accept_encoding: ``identity`` keeps gateways from compressing or decompressing on the way; not all stores.
    """

    origin: Origin
    request_target: str = field(repr=False)
    signer: object = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    accept_encoding: str = "identity"


def _refused_by_s3(place: Place, head: ResponseHead, body: bytes, anonymous: bool) -> Exception:
    error = parse_store_error(body, head.headers)
    return classify(
        place,
        head.status,
        code=error.code,
        message=error.message,
        request_id=head.headers.get("x-amz-request-id"),
        region=error.region,
        retry_after=retry_after(head.headers),
        anonymous=anonymous,
    )


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """One object to read from.

    Attributes:
        url: as the user would write it.
        size: bytes.
        etag: sent as ``If-Match`` and compared with the answer; None reads unpinned.
        version: that `address` names, for messages.
        identity: as in `Expected`.
        refused: makes an error of a refusal; by default as S3's are to be understood.
        address: returns where to ask. It is given the address that the store called expired, if one was.
    """

    url: str
    size: int
    etag: str | None
    address: Callable[[Address | None], Awaitable[Address]]
    anonymous: bool = False
    version: str | None = None
    identity: tuple[str, str] | None = None
    refused: Refused = _refused_by_s3


#: Performs one try: fills the scatter from its cursor on, or raises `TransientFailure`,
#: `CredentialsExpired` or a `SourceError`. ``renew`` asks for fresh credentials.
TryRead = Callable[[int, Scatter, bool], Awaitable[None]]


async def read_resuming(
    try_read: TryRead, start: int, scatter: Scatter, policy: RetryPolicy, stats: TransferStats, pressure: Pressure
) -> None:
    """Fill `scatter` with the bytes from `start` on, resuming after each failure at the last good byte.

    Shared by every transport, so that they fail alike.

    Raises:
        SourceError: permanently refused, or given up.
    """
    renewals = 0

    async def attempt(attempts: Attempts) -> None:
        nonlocal renewals
        renew = False
        while True:
            before = scatter.filled
            stats.requests += 1
            try:
                async with pressure.admitted(scatter.remaining):
                    return await try_read(start + before, scatter, renew)
            except CredentialsExpired as expired:
                if renewals:
                    raise expired.final from None
                renewals, renew = 1, True
                stats.retries += 1
            finally:
                gained = scatter.filled - before
                stats.note_bytes(gained)
                attempts.progressed = gained >= _PROGRESS_BYTES

    def on_retry(failure: TransientFailure) -> None:
        if failure.final.status in _ASKED_TOO_MUCH or failure.asked_too_much:
            stats.throttled += 1
            pressure.refused()
        stats.retries += 1
        stats.resumed_bytes += scatter.filled - seen[0]
        seen[0] = scatter.filled

    seen = [0]
    await call_with_retries(attempt, policy, on_retry)


class RangeReader:
    """Reads ranges over connections of its own. One per source and event loop."""

    def __init__(
        self,
        lanes: Lanes,
        config: StreamConfig,
        policy: RetryPolicy,
        stats: TransferStats,
        pressure: Pressure,
    ) -> None:
        self._lanes = lanes
        self._pressure = pressure
        self._policy = policy
        self._stats = stats
        self._idle_timeout = config.idle_timeout_seconds
        self._least_bytes = int(config.min_rate_bytes_per_second * config.idle_timeout_seconds)

    async def read(self, target: ReadTarget, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, in order, with the object's bytes from `start` on.

        Once this has returned or raised, or its task was cancelled, nothing writes to the buffers.

        Raises:
            SourceError: see `streamer.errors`; the message names object, range and what came back.
        """
        scatter = Scatter(buffers)
        end = start + scatter.length
        address: Address | None = None

        async def try_read(position: int, scatter: Scatter, renew: bool) -> None:
            nonlocal address
            chosen = address = await target.address(address if renew else None)
            place = Place(target.url, position, end, target.version)
            before = scatter.filled
            try:
                await self._lanes.run(scatter.remaining, lambda pool: self._try(pool, target, place, chosen, scatter))
            finally:
                self._pressure.delivered(scatter.filled - before, is_cpu_bound=self._lanes.are_busy)
                self._stats.concurrency = self._pressure.limit

        await read_resuming(try_read, start, scatter, self._policy, self._stats, self._pressure)

    async def _try(
        self, pool: ConnectionPool, target: ReadTarget, place: Place, address: Address, scatter: Scatter
    ) -> None:
        try:
            connection = await pool.acquire(address.origin)
        except ConnectFailed as failure:
            if failure.is_permanent:
                raise SourceError(str(failure), hint=failure.hint, url=target.url) from failure
            raise unavailable(place, str(failure), hint=failure.hint) from failure
        try:
            await self._exchange(connection, address, target, place, scatter)
        finally:
            pool.release(connection, address.origin)

    async def _exchange(
        self, connection: HttpConnection, address: Address, target: ReadTarget, place: Place, scatter: Scatter
    ) -> None:
        assert place.start is not None
        assert place.end is not None
        expected = Expected(place.start, place.end, target.size, target.etag, target.identity)

        def accept(head: ResponseHead) -> bool:
            if head.status not in (200, 206):
                return False
            check_range_response(expected, head.status, head.headers)
            self._pressure.answered(time.monotonic() - asked)
            return True

        was_used = connection.exchanges > 0
        asked = time.monotonic()
        try:
            head, body = await connection.exchange(
                _render(address, expected),
                accept,
                scatter,
                idle_timeout_seconds=self._idle_timeout,
                min_bytes_per_period=self._least_bytes,
            )
        except ConnectionDropped as dropped:
            # A server may close an idle connection at any moment; that says nothing about its health.
            stale = was_used and dropped.before_response
            raise unavailable(place, str(dropped), free=stale) from dropped
        except ResponseStalled as stalled:
            raise unavailable(place, f"the response stalled: {stalled}") from stalled
        except (WrongResponse, MalformedResponse) as wrong:
            raise bad_response(place, None, str(wrong)) from wrong
        if head.status in (200, 206):
            return
        raise target.refused(place, head, body, target.anonymous)


def _render(address: Address, expected: Expected) -> bytes:
    """Write the request. Range and If-Match are not part of the signature, so one URL serves all ranges."""
    origin = address.origin
    target = address.request_target
    lines = []
    if origin.proxy is not None and origin.scheme == "http":
        target = f"http://{origin.authority}{target}"  # absolute form, RFC 9112, section 3.2.2
        if origin.proxy.authorization:
            lines.append(f"Proxy-Authorization: {origin.proxy.authorization}")
    lines += [
        f"Host: {origin.authority}",
        "User-Agent: s3stream",
        f"Accept-Encoding: {address.accept_encoding}",
        f"Range: bytes={expected.start}-{expected.end - 1}",
    ]
    if expected.etag is not None:
        lines.append(f"If-Match: {expected.etag}")
    lines += [f"{name}: {value}" for name, value in address.headers]
    return "\r\n".join((f"GET {target} HTTP/1.1", *lines, "", "")).encode("latin-1")
