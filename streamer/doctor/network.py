"""From a name to an answer, one step at a time, so that the step that fails can be named.

Blocking sockets, run in a thread: there is one connection, and what matters is which call fails and how long it takes.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from streamer.doctor.checks import Finding
from streamer.doctor.settings import Settings
from streamer.doctor.wire import (
    Answer,
    certificate_of,
    exchange,
    expiry_of,
    issuer_of,
    reason_of,
    speaks_http,
    speaks_tls,
)
from streamer.errors import BadResponseError, CredentialsError, SourceError, SourceUnavailableError
from streamer.sources.network import ssl_context_for
from streamer.transport.checks import parse_store_error
from streamer.transport.pool import Origin
from streamer.transport.tls_errors import explain_tls_failure

__all__ = ["Network"]

T = TypeVar("T")

#: S3 refuses requests whose time differs by more; RequestTimeTooSkewed in
#: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_REFUSED_SKEW_SECONDS = 900.0
_NOTED_SKEW_SECONDS = 60.0
_SOON = timedelta(days=14)


@dataclass(slots=True)
class Network:
    """One connection to where requests for a bucket go; each method is a check, and needs those before it.

    Args:
        settings: checked before; they say where to, and through what.
    """

    settings: Settings
    _socket: socket.socket | None = None
    _answer: Answer | None = None
    _context: ssl.SSLContext | None = field(default=None, repr=False)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    @property
    def _origin(self) -> Origin:
        return self.settings.origin

    @property
    def _timeout(self) -> float:
        return self.settings.config.connect_timeout_seconds

    @property
    def _peer(self) -> tuple[str, int, str]:
        """Host, port and a name for messages: the proxy's, if there is one."""
        proxy = self._origin.proxy
        if proxy is None:
            return self._origin.host, self._origin.port, self._origin.authority
        return proxy.host, proxy.port, f"the proxy {proxy.host}:{proxy.port}"

    @property
    def _remedy(self) -> str:
        """What to look at when nothing answers."""
        if self._origin.proxy is not None:
            return f"correct {self.settings.proxy_variable}, or name {self._origin.host} in NO_PROXY"
        if self.settings.is_custom:
            return "check the host and port in endpoint_url, and that the store runs"
        return "check the region and the network: private subnets need a VPC endpoint for S3, or a way out"

    # -- the checks ------------------------------------------------------------------------------------

    async def dns(self) -> Finding:
        host, port, name = self._peer
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter of names that no host can have
            remedy = self._remedy
            if self._origin.proxy is None and self.settings.is_custom and not self.settings.is_path_style:
                remedy = "set addressing_style=path, which leaves the bucket out of the host's name; or " + remedy
            raise SourceUnavailableError(f"{host} has no address: {reason_of(error)}", hint=remedy) from error
        addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        if addresses == [host]:
            return Finding(f"{host} is an address")
        more = f" and {len(addresses) - 4} more" if len(addresses) > 4 else ""
        return Finding(f"{name} is at {', '.join(addresses[:4])}{more}")

    async def connect(self) -> Finding:
        """TCP, and through a proxy the tunnel for TLS."""
        began = time.perf_counter()
        self._socket = await self._in_thread(self._connect)
        return Finding(f"to {self._peer[2]} in {_milliseconds(began)}")

    async def tls(self) -> Finding:
        context = self._context = ssl_context_for(self.settings.verify)
        began = time.perf_counter()
        plain = self._socket
        assert plain is not None
        secure = await self._in_thread(lambda: self._shake_hands(plain, context))
        self._socket = secure
        certificate = secure.getpeercert() or {}
        text = f"{secure.version()} in {_milliseconds(began)}"
        if not certificate:
            return Finding(f"{text}; the certificate is not checked")
        until = expiry_of(certificate)
        remedy = (
            f"the certificate expires on {until:%Y-%m-%d}; have it renewed"
            if until - datetime.now(UTC) < _SOON
            else None
        )
        return Finding(f"{text}, certificate of {issuer_of(certificate)} until {until:%Y-%m-%d}", remedy)

    async def store(self) -> Finding:
        """Whether S3 answers there: an unsigned listing is refused in S3's words, or answered."""
        try:
            answer = self._answer = await self._in_thread(self._ask)
        except (OSError, http.client.HTTPException) as error:
            is_plain = self._origin.scheme == "http" and self._origin.proxy is None
            if is_plain and await self._in_thread(lambda: speaks_tls(self._connect, self._origin.host)):
                raise SourceUnavailableError(
                    f"{self._origin.authority} speaks TLS, and the endpoint says http",
                    hint="write https:// in endpoint_url",
                ) from None
            raise SourceUnavailableError(
                f"{self._peer[2]} gave no HTTP answer: {reason_of(error)}", hint=self._remedy
            ) from error
        said = f"status {answer.status}"
        code = parse_store_error(answer.body, answer.headers).code
        if code:
            return Finding(f"speaks S3: {said} {code} to a request without a signature")
        if b"ListBucketResult" in answer.body:
            return Finding("speaks S3, and lists without credentials")
        await self._refuse(answer, said)
        if any(name.startswith("x-amz-") for name in answer.headers):
            return Finding(f"speaks S3: {said}")
        return Finding(
            f"{said} without a word in S3's form to a request without a signature",
            "if the next checks fail, see whether endpoint_url is that of an S3 API",
        )

    @property
    def tells_time(self) -> bool:
        """Whether the store's answer has a date to compare with."""
        return self._answer is not None and self._answer.date is not None

    async def clock(self) -> Finding:
        """Compare with the store's ``Date``; only if it `tells_time`."""
        answer = self._answer
        assert answer is not None
        theirs = answer.date
        assert theirs is not None
        # The header has whole seconds, cut off.
        skew = (answer.sent_at + answer.received_at) / 2 - theirs - 0.5
        size = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the store's"
        if abs(skew) > _REFUSED_SKEW_SECONDS:
            raise CredentialsError(
                f"this machine's clock is {size}; with more than 15 minutes, signatures are refused",
                hint="set this machine's clock, for instance with chrony",
            )
        if abs(skew) > _NOTED_SKEW_SECONDS:
            return Finding(f"this machine's clock is {size}", "have it set by NTP; S3 takes up to 15 minutes")
        return Finding(f"within {max(1, round(abs(skew)))} s of the store's")

    # -- blocking ----------------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    def _connect(self) -> socket.socket:
        host, port, name = self._peer
        timeout = self._timeout
        try:
            connected = socket.create_connection((host, port), timeout)
        except TimeoutError as error:
            raise SourceUnavailableError(
                f"{name} does not answer within {timeout:g} s",
                hint=f"{self._remedy}; firewalls and security groups drop packets like this",
            ) from error
        except OSError as error:
            raise SourceUnavailableError(f"no connection to {name}: {reason_of(error)}", hint=self._remedy) from error
        try:
            if self._origin.proxy is not None and self._origin.scheme == "https":
                self._tunnel(connected)
        except BaseException:
            connected.close()
            raise
        return connected

    def _tunnel(self, connected: socket.socket) -> None:
        target = f"{_bracketed(self._origin.host)}:{self._origin.port}"
        try:
            answer = exchange(connected, "CONNECT", target, {"Host": target, **self._proxy_headers()}, self._timeout)
        except (OSError, http.client.HTTPException) as error:
            raise SourceUnavailableError(
                f"{self._peer[2]} did not answer to CONNECT: {reason_of(error)}", hint=self._remedy
            ) from error
        if answer.status == 407:
            raise self._unknown_to_proxy()
        if answer.status != 200:
            raise SourceUnavailableError(
                f"{self._peer[2]} refuses connections to {target}", status=answer.status, hint=self._remedy
            )

    def _unknown_to_proxy(self) -> SourceError:
        return SourceUnavailableError(
            f"{self._peer[2]} wants to know who we are",
            status=407,
            hint=f"put user and password into {self.settings.proxy_variable} (percent-encoded), or name "
            f"{self._origin.host} in NO_PROXY",
        )

    def _proxy_headers(self) -> dict[str, str]:
        proxy = self._origin.proxy
        return {} if proxy is None or proxy.authorization is None else {"Proxy-Authorization": proxy.authorization}

    def _ask(self) -> Answer:
        assert self._socket is not None
        target = self.settings.target
        headers = {"Host": self._origin.authority}
        if self._origin.proxy is not None and self._origin.scheme == "http":
            target = f"http://{self._origin.authority}{target}"
            headers |= self._proxy_headers()
        return exchange(self._socket, "GET", target, headers, self._timeout)

    # -- what to make of it ------------------------------------------------------------------------------

    async def _refuse(self, answer: Answer, said: str) -> None:
        """Raise if somebody else than a store has answered."""
        if answer.status == 407:
            raise self._unknown_to_proxy()
        location = answer.headers.get("location", "")
        start = answer.body[:2000].decode("utf-8", "replace").lower()
        is_page = "text/html" in answer.headers.get("content-type", "") or "<html" in start
        if b"HTTPS server" in answer.body or b"SSL-enabled" in answer.body or location.startswith("https:"):
            raise BadResponseError(
                f"{self._origin.authority} wants TLS, and the endpoint says http",
                hint="write https:// in endpoint_url",
                status=answer.status,
            )
        if self._origin.proxy is not None and answer.status >= 500:
            raise SourceUnavailableError(
                f"{self._peer[2]} did not get through to {self._origin.authority}",
                status=answer.status,
                hint=self._remedy,
            )
        if is_page:
            title = re.search(r"<title>\s*([^<]{1,80}?)\s*</title>", start)
            raise BadResponseError(
                f"{self._origin.authority} answers with a web page{f' ({title[1]!r})' if title else ''}, not with S3's "
                f"API ({said})",
                hint="endpoint_url must be the address of the store's S3 API, not of its console, a login page or a "
                "web site",
            )

    def _shake_hands(self, plain: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        try:
            return context.wrap_socket(plain, server_hostname=self._origin.host)
        except OSError as error:  # of which ssl.SSLError is one
            raise self._explain_tls(error) from None

    def _explain_tls(self, error: OSError) -> SourceError:
        where = self._origin.authority
        if isinstance(error, ssl.SSLCertVerificationError):
            why, hint = explain_tls_failure(error, where)
            certificate = certificate_of(self._connect, self._origin.host)
            if certificate:
                why += f"; it was issued by {issuer_of(certificate)} and ends on {expiry_of(certificate):%Y-%m-%d}"
            return SourceError(why, hint=hint)
        if speaks_http(self._connect, self._origin.authority, self._timeout):
            return SourceUnavailableError(
                f"{where} speaks plain HTTP, and the endpoint says https", hint="write http:// in endpoint_url"
            )
        if isinstance(error, ssl.SSLError):
            why, hint = explain_tls_failure(error, where)
            return SourceUnavailableError(why, hint=hint)
        return SourceUnavailableError(f"{where} broke off the TLS handshake: {reason_of(error)}", hint=self._remedy)


def _milliseconds(began: float) -> str:
    return f"{(time.perf_counter() - began) * 1e3:.1f} ms"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
