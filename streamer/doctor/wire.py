"""Single exchanges over blocking sockets, and what certificates say of themselves."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from streamer.sources.network import ssl_context_for
from streamer.transport.error_body import MAX_ERROR_BODY_BYTES

__all__ = ["Answer", "certificate_of", "exchange", "expiry_of", "issuer_of", "reason_of", "speaks_http", "speaks_tls"]

#: Opens a connection; raises OSError.
Connect = Callable[[], socket.socket]

#: Certificates are looked at whatever their dates; X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which `ssl` has no name for.
_NO_CHECK_TIME = 0x200000


@dataclass(frozen=True, slots=True)
class Answer:
    """To one request; names of headers are lower case, times are those of this machine, in seconds since 1970."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    sent_at: float
    received_at: float

    @property
    def date(self) -> float | None:
        """When it was sent by the sender's clock, in seconds since 1970; None if it does not say."""
        try:
            return email.utils.parsedate_to_datetime(self.headers.get("date", "")).timestamp()
        except ValueError:
            return None


def exchange(
    connected: socket.socket, method: str, target: str, headers: Mapping[str, str], timeout_seconds: float
) -> Answer:
    """Send a request without a body and receive what is answered, the body cut where error documents are.

    Raises:
        OSError: the connection broke, or nothing came in time.
        http.client.HTTPException: what came is not HTTP.
    """
    fields = {**headers, "User-Agent": "s3stream", "Accept-Encoding": "identity"}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    connected.settimeout(timeout_seconds)
    sent_at = time.time()
    connected.sendall("\r\n".join(lines).encode("latin-1"))
    response = http.client.HTTPResponse(connected, method=method)
    try:
        response.begin()
        received_at = time.time()
        body = b""
        if method != "CONNECT":
            with contextlib.suppress(OSError, http.client.HTTPException):  # the status says enough
                body = response.read(MAX_ERROR_BODY_BYTES)
        answered = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, answered, body, sent_at, received_at)
    finally:
        response.close()


def speaks_http(connect: Connect, host: str, timeout_seconds: float) -> bool:
    """Whether whoever is there answers a request without TLS."""
    with contextlib.suppress(OSError, http.client.HTTPException), connect() as plain:
        exchange(plain, "GET", "/favicon.ico", {"Host": host}, timeout_seconds)
        return True
    return False


def speaks_tls(connect: Connect, host: str) -> bool:
    """Whether whoever is there shakes hands, with whatever certificate."""
    context = ssl_context_for(False)
    with contextlib.suppress(OSError), connect() as plain, context.wrap_socket(plain, server_hostname=host):
        return True
    return False


def certificate_of(connect: Connect, host: str) -> Mapping[str, Any]:
    """Return what is in a certificate that is not trusted, as ``getpeercert`` does; empty if it cannot be had.

    `ssl` decodes only those that it trusts, so on a second visit this one is.
    """
    with contextlib.suppress(OSError, ValueError):
        with connect() as plain, ssl_context_for(False).wrap_socket(plain, server_hostname=host) as secure:
            raw = secure.getpeercert(binary_form=True)
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
        trusting.load_verify_locations(cadata=raw or b"")
        with connect() as plain, trusting.wrap_socket(plain, server_hostname=host) as secure:
            return secure.getpeercert() or {}
    return {}


def expiry_of(certificate: Mapping[str, Any]) -> datetime:
    """Return the end of a certificate, as ``getpeercert`` gives it."""
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), UTC)


def issuer_of(certificate: Mapping[str, Any]) -> str:
    """Name who signed a certificate."""
    names = {name: value for part in certificate.get("issuer", ()) for name, value in part}
    return str(names.get("commonName") or names.get("organizationName") or "an issuer without a name")


def reason_of(error: Exception) -> str:
    """Say why a connection failed."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
