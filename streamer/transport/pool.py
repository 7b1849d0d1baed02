"""Keep-alive connections by origin, opened directly or through a proxy."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit

from aiohappyeyeballs import AddrInfoType, start_connection

from streamer.errors import ConfigError
from streamer.transport.connection import HttpConnection
from streamer.transport.failures import OPEN_FILES_HINT, is_out_of_files
from streamer.transport.head import HeadParser, MalformedResponse
from streamer.transport.tls_errors import explain_tls_failure

__all__ = ["ConnectFailed", "ConnectionPool", "Origin", "Proxy", "parse_origin", "proxy_for"]

P = TypeVar("P", bound=asyncio.BaseProtocol)

_HAPPY_EYEBALLS_DELAY_SECONDS = 0.25  # RFC 8305, section 8


class ConnectFailed(Exception):
    """No connection could be opened.

    Attributes:
        hint: what to check.
        is_permanent: trying again cannot help (a certificate that is not trusted).
        is_out_of_files: a connection given back would do instead.
    """

    def __init__(
        self, reason: str, *, hint: str | None = None, is_permanent: bool = False, is_out_of_files: bool = False
    ) -> None:
        super().__init__(reason)
        self.hint = hint
        self.is_permanent = is_permanent
        self.is_out_of_files = is_out_of_files


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; the password is kept out of `repr`."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where connections go: they are shared by every object with an equal origin."""

    scheme: str
    host: str
    port: int
    proxy: Proxy | None = None

    @property
    def authority(self) -> str:
        """``host[:port]`` as in the Host header: the default port is left out, IPv6 is bracketed."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == default else f"{host}:{self.port}"


def parse_origin(url: str, proxy: Proxy | None = None) -> tuple[Origin, str]:
    """Split a URL into its origin and the request target behind it."""
    parts: SplitResult = urlsplit(url)
    assert parts.hostname is not None
    origin = Origin(parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme], proxy)
    target = parts.path or "/"
    return origin, f"{target}?{parts.query}" if parts.query else target


def proxy_for(url: str, otherwise: str) -> Proxy:
    """Parse the URL of a proxy.

    Args:
        otherwise: what to do instead when it is of another kind.

    Raises:
        ConfigError: a proxy that is itself spoken to over TLS, or by SOCKS, or a URL that is none.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or 80
        if "@" in parts.path + parts.query + parts.fragment:
            raise ValueError
    except ValueError:
        # Neither chained nor quoted: what looks like a host or a port may be half of a password.
        raise ConfigError(
            "the URL of the proxy cannot be understood", hint="percent-encode its user name and password"
        ) from None
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(
            f"the proxy at {parts.hostname or 'an unnamed host'} needs {parts.scheme}, which the native reader "
            "does not speak",
            hint=otherwise,
        )
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(parts.hostname, port, authorization)


class ConnectionPool:
    """Hands out connections, most recently used first, so that few stay open when few are needed.

    How many are open at once is the caller's business: it holds one per read in flight.
    """

    def __init__(self, *, ssl_context: ssl.SSLContext | None, connect_timeout_seconds: float) -> None:
        self._ssl_context = ssl_context
        self._timeout = connect_timeout_seconds
        self._idle: dict[Origin, list[HttpConnection]] = {}
        self._in_use = 0
        self._opened = 0
        self._given_back = asyncio.Event()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<ConnectionPool {sum(map(len, self._idle.values()))} idle>"

    async def acquire(self, origin: Origin) -> HttpConnection:
        """Return an idle connection or open one.

        Where no more files may be opened, this waits for a connection that is in use: fewer than the
        caller would like are slower, not an error.

        Raises:
            ConnectFailed: DNS, TCP, proxy or TLS failed, or took longer than the connect timeout.
        """
        while True:
            try:
                connection = self._take_idle(origin) or await self._open(origin)
            except ConnectFailed as failure:
                if not failure.is_out_of_files or not self._in_use:
                    raise
                await self._given_back.wait()
            else:
                self._in_use += 1
                return connection

    def _take_idle(self, origin: Origin) -> HttpConnection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_reusable:
                return connection
        return None

    def release(self, connection: HttpConnection, origin: Origin) -> None:
        """Take back a connection whose exchange is over."""
        self._in_use -= 1
        if self._is_closed or not connection.is_reusable:
            connection.close()
        else:
            self._idle.setdefault(origin, []).append(connection)
        self._given_back.set()  # wakes all who wait now, after the loop has closed what was closed
        self._given_back.clear()

    def close(self) -> None:
        """Close every idle connection, and those in use when they come back."""
        self._is_closed = True
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def _open(self, origin: Origin) -> HttpConnection:
        via = f" through the proxy {origin.proxy.host}:{origin.proxy.port}" if origin.proxy else ""
        where = f"{origin.scheme}://{origin.authority}{via}"
        try:
            async with asyncio.timeout(self._timeout):
                return await self._connect(origin)
        except TimeoutError:
            raise ConnectFailed(
                f"no connection to {where} within {self._timeout:g} s",
                hint="check the endpoint, firewall and proxy settings",
            ) from None
        except ssl.SSLCertVerificationError as error:
            why, hint = explain_tls_failure(error, where)
            raise ConnectFailed(why, hint=hint, is_permanent=True) from error
        except ssl.SSLError as error:
            why, hint = explain_tls_failure(error, where)
            raise ConnectFailed(why, hint=hint) from error
        except (OSError, MalformedResponse) as error:
            raise ConnectFailed(
                f"cannot connect to {where}: {error.strerror or error}"
                if isinstance(error, OSError)
                else f"cannot connect to {where}: {error}",
                hint=OPEN_FILES_HINT if is_out_of_files(error) else "check the endpoint, firewall and proxy settings",
                is_out_of_files=is_out_of_files(error),
            ) from error

    async def _connect(self, origin: Origin) -> HttpConnection:
        loop = asyncio.get_running_loop()
        connection = HttpConnection(loop)
        context = self._ssl_context if origin.scheme == "https" else None
        if context is None:
            await self._open_transport(loop, origin, lambda: connection)
            return connection
        # Not create_connection(ssl=...): cancelled before its handshake begins, that leaves its socket to nobody.
        transport, tunnel = await self._open_transport(loop, origin, lambda: _Tunnel(loop))
        try:
            if origin.proxy is not None:
                await tunnel.request(origin, origin.proxy)
            if transport.is_closing() or not (
                secured := await loop.start_tls(transport, connection, context, server_hostname=origin.host)
            ):
                raise ConnectionError("the connection was closed before it was encrypted")
        except BaseException:
            transport.abort()
            raise
        connection.connection_made(secured)
        return connection

    async def _open_transport(
        self, loop: asyncio.AbstractEventLoop, origin: Origin, protocol: Callable[[], P]
    ) -> tuple[asyncio.Transport, P]:
        host, port = (origin.proxy.host, origin.proxy.port) if origin.proxy else (origin.host, origin.port)
        sock = await start_connection(
            await self._addresses(loop, host, port),
            happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY_SECONDS,
            interleave=1,
            loop=loop,
        )
        return await loop.create_connection(protocol, sock=sock)  # closes it when it fails

    async def _addresses(self, loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[AddrInfoType]:
        """Return where `host` can be reached, beginning with another address each time.

        Large stores answer with several, each a machine with a link of its own, and the system's resolver sorts them,
        so that the first would get every connection.
        """
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        turn, self._opened = self._opened, self._opened + 1
        rotated: list[AddrInfoType] = []
        for family in dict.fromkeys(info[0] for info in found):  # which family comes first is the system's choice
            same = [info for info in found if info[0] == family]
            rotated += same[turn % len(same) :] + same[: turn % len(same)]
        return rotated


class _Tunnel(asyncio.Protocol):
    """What speaks before encryption: asks a proxy for a way to the origin (RFC 9110, section 9.3.6)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = HeadParser()
        self._opened: asyncio.Future[int] | None = None

    async def request(self, origin: Origin, proxy: Proxy) -> None:
        """Ask for a tunnel and wait for the answer.

        Raises:
            ConnectionError: the proxy refused, or closed the connection.
            MalformedResponse: not HTTP/1.1.
        """
        if self._transport is None:
            raise ConnectionError("the proxy closed the connection")
        self._opened = self._loop.create_future()
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        lines = [f"CONNECT {host}:{origin.port} HTTP/1.1", f"Host: {host}:{origin.port}"]
        if proxy.authorization:
            lines.append(f"Proxy-Authorization: {proxy.authorization}")
        self._transport.write(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
        status = await self._opened
        if status != 200:
            raise ConnectionError(f"the proxy refused with status {status}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._opened is None or self._opened.done():
            return
        try:
            parsed = self._parser.feed(data)
        except MalformedResponse as error:
            self._opened.set_exception(error)
            return
        if parsed is not None:
            self._opened.set_result(parsed[0].status)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(exc or ConnectionError("the proxy closed the connection"))
