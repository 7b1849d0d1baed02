"""One HTTP/1.1 connection that receives response bodies straight into their destination.

Theory of operation. ``asyncio.BufferedProtocol`` asks us where the next bytes go. While a head is
awaited they go to a small scratch buffer; as soon as the head has been checked they go to the memory
of the `Scatter` that the caller gave, so the kernel writes weights where they belong and no Python
object is made per chunk. Three rules keep that safe:

1. `get_buffer` never returns an empty buffer. uvloop asks for one even after a body is complete, and
   an empty one closes the connection.
2. The scatter is let go the moment the exchange ends, however it ends. Whatever arrives later lands in
   scratch, so a cancelled or failed exchange cannot write into memory that has a new owner.
3. The buffer offered never exceeds what is left of the body, so a server that sends too much is
   noticed instead of overwriting what follows.

Waking up for every few packets is what costs the most after the copy itself. While a long body is under
way, the socket's low-water mark (SO_RCVLOWAT, man 7 socket) tells the kernel to wake us only once
`_LOW_WATER_BYTES` are there or the body's rest is. A closed connection wakes us in any case. Before a
response is called stalled the mark is lowered, so that bytes already in the kernel count.
"""

from __future__ import annotations

import asyncio
import enum
import socket
from collections.abc import Callable
from typing import cast

from streamer.transport.error_body import ErrorBody
from streamer.transport.head import HeadParser, ResponseHead
from streamer.transport.scatter import Scatter

__all__ = ["ConnectionDropped", "HttpConnection", "ResponseStalled"]

_SCRATCH_BYTES = 16 << 10
_LOW_WATER_BYTES = 256 << 10
#: How long bytes that the kernel held back have to arrive before a response counts as stalled.
_GRACE_SECONDS = 0.5


class ConnectionDropped(Exception):
    """The connection ended before the response was complete.

    Attributes:
        before_response: no byte of this response had arrived.
    """

    def __init__(self, reason: str, *, before_response: bool) -> None:
        super().__init__(reason)
        self.before_response = before_response


class ResponseStalled(Exception):
    """The response delivered less than the minimum rate for a whole idle period."""


class _State(enum.Enum):
    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ERROR_BODY = enum.auto()
    CLOSED = enum.auto()


class HttpConnection(asyncio.BufferedProtocol):
    """Performs one exchange at a time; see `exchange`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._state = _State.IDLE
        self._reusable = True
        self._socket: socket.socket | None = None
        self._low_water = 1
        self.exchanges = 0
        self._reset()

    def _reset(self) -> None:
        self._parser: HeadParser | None = None
        self._accept: Callable[[ResponseHead], bool] | None = None
        self._scatter: Scatter | None = None
        self._head: ResponseHead | None = None
        self._error_body: ErrorBody | None = None
        self._done: asyncio.Future[tuple[ResponseHead, bytes]] | None = None
        self._received = 0

    def __repr__(self) -> str:
        return f"<HttpConnection {self._state.name.lower()}, {self.exchanges} exchanges>"

    # -- what the owner uses -------------------------------------------------------------------------

    @property
    def is_reusable(self) -> bool:
        """Whether another exchange may be started."""
        return self._state is _State.IDLE and self._reusable and self._transport is not None

    def close(self) -> None:
        """Drop the connection at once; nothing is written to any caller's memory afterwards."""
        self._state = _State.CLOSED
        self._scatter = None
        if self._transport is not None:
            self._transport.abort()

    async def exchange(
        self,
        request: bytes,
        accept: Callable[[ResponseHead], bool],
        scatter: Scatter,
        *,
        idle_timeout_seconds: float,
        min_bytes_per_period: int,
    ) -> tuple[ResponseHead, bytes]:
        """Send `request` and receive its response.

        Args:
            request: the whole request.
            accept: called with the head. True: the body goes to `scatter`, whose `remaining` is its
                exact length. False: the response is an error, and its body is returned. It may raise to
                refuse the response.
            scatter: where an accepted body goes. Untouched after this returns, raises or is cancelled.
            idle_timeout_seconds: how long the response may go without `min_bytes_per_period` bytes.

        Returns:
            The head, and the error body, cut to 64 KiB (empty when the body was accepted).

        Raises:
            ConnectionDropped: the peer closed early. Bytes in `scatter` before its cursor are good.
            ResponseStalled: too slow; likewise.
            MalformedResponse: not HTTP/1.1.
            Exception: whatever `accept` raised.
        """
        if not self.is_reusable:
            raise ConnectionDropped("the connection was already closed", before_response=True)
        assert self._transport is not None
        self._reset()
        self._state = _State.HEAD
        self._parser, self._accept, self._scatter = HeadParser(), accept, scatter
        done = self._done = self._loop.create_future()
        self.exchanges += 1
        self._transport.write(request)
        watch = _StallWatch(self._loop, self, idle_timeout_seconds, min_bytes_per_period)
        try:
            result: tuple[ResponseHead, bytes] = await done
        except BaseException:
            self.close()
            raise
        else:
            return result
        finally:
            watch.cancel()
            self._scatter = None
            if self._state is not _State.CLOSED and not self._reusable:
                self.close()

    @property
    def received(self) -> int:
        """Bytes received since the current exchange began, head included."""
        return self._received

    @property
    def outstanding(self) -> int:
        """Bytes of the current body that have not arrived."""
        return self._scatter.remaining if self._scatter is not None else 0

    def stalled(self, reason: str) -> None:
        """End the current exchange, because it is too slow."""
        if self._state is _State.ERROR_BODY:
            self._reusable = False
            self._finish()  # the status says enough
        else:
            self.fail(ResponseStalled(reason))

    def fail(self, error: Exception) -> None:
        """End the current exchange with `error`."""
        self._scatter = None
        self._state = _State.CLOSED
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        if self._transport is not None:
            self._transport.abort()

    # -- what the event loop calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if transport.get_extra_info("ssl_object") is None:  # under TLS, records are what wakes us
            self._socket = transport.get_extra_info("socket")

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._state is _State.BODY and self._scatter is not None:
            return self._scatter.view
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if self._state is _State.BODY and self._scatter is not None:
            self._scatter.advance(nbytes)
            remaining = self._scatter.remaining
            if not remaining:
                self._finish()
            elif remaining < self._low_water:
                self._set_low_water(remaining)
            return
        try:
            self._on_scratch(bytes(self._scratch[:nbytes]))
        except Exception as error:  # noqa: BLE001 - `accept` may raise anything; it belongs to the exchange
            self.fail(error)

    def _on_scratch(self, data: bytes) -> None:
        if self._state is _State.HEAD:
            assert self._parser is not None
            assert self._accept is not None
            assert self._scatter is not None
            parsed = self._parser.feed(data)
            if parsed is None:
                return
            self._head, rest = parsed
            self._reusable = self._head.keeps_alive
            if not self._accept(self._head):
                self._state = _State.ERROR_BODY
                self._error_body = ErrorBody(self._head.status, self._head.headers)
                self._on_error_body(rest)
                return
            if "content-length" not in self._head.headers:
                self._reusable = False  # the body's end is only known from the range
            self._state = _State.BODY
            wanted = self._scatter.remaining
            self._scatter.write(rest[:wanted])
            if len(rest) > wanted:
                self._reusable = False
            if not self._scatter.remaining:
                self._finish()
            elif self._scatter.remaining > _LOW_WATER_BYTES:
                self._set_low_water(_LOW_WATER_BYTES)
        elif self._state is _State.ERROR_BODY:
            self._on_error_body(data)
        else:
            # Bytes that no request asked for: what they belong to is unknown, so nothing after them counts.
            self._reusable = False
            self.close()

    def _on_error_body(self, data: bytes) -> None:
        assert self._error_body is not None
        if self._error_body.feed(data):
            self._reusable = self._reusable and self._error_body.is_exact
            self._finish()

    def _set_low_water(self, nbytes: int) -> None:
        if self._socket is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low_water = nbytes

    def drain(self) -> bool:
        """Let everything that the kernel holds back through; return whether it was holding back."""
        if self._low_water == 1:
            return False
        self._set_low_water(1)
        return True

    def _finish(self) -> None:
        assert self._head is not None
        self.drain()
        self._state = _State.IDLE
        self._scatter = None
        if self._done is not None and not self._done.done():
            self._done.set_result((self._head, self._error_body.content if self._error_body is not None else b""))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        state, self._state = self._state, _State.CLOSED
        self._transport = None
        self._scatter = None
        if self._done is None or self._done.done():
            return
        if state is _State.ERROR_BODY:
            self._finish()  # the status says enough
            self._state = _State.CLOSED
            return
        reason = f"the connection broke: {exc}" if exc else "the server closed the connection"
        self._done.set_exception(ConnectionDropped(reason, before_response=self._received == 0))


class _StallWatch:
    """Ends an exchange that received less than `least` bytes in a whole period."""

    __slots__ = ("_connection", "_handle", "_least", "_loop", "_period", "_seen", "_spared")

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: HttpConnection, period: float, least: int) -> None:
        self._loop, self._connection, self._period, self._least = loop, connection, period, max(1, least)
        self._seen = 0
        self._spared = False
        self._handle = loop.call_later(period, self._check)

    def _check(self) -> None:
        received = self._connection.received
        # The last few bytes of a body, or a short one, get one period in which any byte will do; with one
        # after the other, a few kilobytes could take hours.
        spares = self._connection.outstanding <= self._least and not self._spared
        least = 1 if spares else self._least
        if received - self._seen < least and self._connection.drain():
            self._handle = self._loop.call_later(_GRACE_SECONDS, self._check)
            return
        if received - self._seen < least:
            self._connection.stalled(f"only {received - self._seen} bytes arrived in {self._period:g} s")
            return
        self._seen = received
        self._spared = self._spared or spares
        self._handle = self._loop.call_later(self._period, self._check)

    def cancel(self) -> None:
        self._handle.cancel()
