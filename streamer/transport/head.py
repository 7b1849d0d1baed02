"""HTTP/1.1 response heads (RFC 9112, sections 2 to 4): bytes in, a parsed head out, no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MAX_HEAD_BYTES", "HeadParser", "MalformedResponse", "ResponseHead"]

#: S3 and GCS heads have about 1 KiB; every server we know refuses to send more than this.
MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 200

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([0-9]{3})(?: ([^\r\n]*))?")
_FIELD_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class MalformedResponse(ValueError):
    """The bytes are not the head of an HTTP/1.1 response."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status line and headers; names are lower case, repeated fields are joined with ``", "``."""

    status: int
    reason: str
    headers: Mapping[str, str]
    minor_version: int = 1

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may be used again after this response (RFC 9112, section 9.3)."""
        options = {option.strip().lower() for option in self.headers.get("connection", "").split(",")}
        if "close" in options:
            return False
        return self.minor_version == 1 or "keep-alive" in options


class HeadParser:
    """Takes the bytes of one response until its head is complete; interim 1xx heads are skipped."""

    __slots__ = ("_received",)

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> tuple[ResponseHead, bytes] | None:
        """Add bytes.

        Returns:
            None while the head is incomplete, then the head and the bytes that followed it.

        Raises:
            MalformedResponse: this is not HTTP/1.1. The parser is then unusable.
        """
        self._received += data
        while True:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                if len(self._received) > MAX_HEAD_BYTES:
                    raise MalformedResponse(f"the response head has more than {MAX_HEAD_BYTES} bytes")
                # Anything else than HTTP is refused at once, not after 64 KiB of it.
                if not b"HTTP/1.".startswith(self._received[:7]):
                    raise MalformedResponse(f"not an HTTP/1.1 response: {bytes(self._received[:40])!r}")
                return None
            if end > MAX_HEAD_BYTES:
                raise MalformedResponse(f"the response head has more than {MAX_HEAD_BYTES} bytes")
            head = _parse(bytes(self._received[:end]))
            rest = bytes(self._received[end + 4 :])
            if head.status >= 200:
                return head, rest
            self._received = bytearray(rest)
            if not rest:
                return None


def _parse(raw: bytes) -> ResponseHead:
    status_line, *lines = raw.split(b"\r\n")
    match = _STATUS_LINE.fullmatch(status_line)
    if not match:
        raise MalformedResponse(f"not an HTTP/1.1 status line: {status_line[:80]!r}")
    if len(lines) > _MAX_HEADERS:
        raise MalformedResponse(f"the response has {len(lines)} headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        # Folded lines and blanks before the colon are forbidden: they are how responses are smuggled.
        if not colon or not _FIELD_NAME.fullmatch(name) or b"\r" in value or b"\n" in value or b"\0" in value:
            raise MalformedResponse(f"malformed header line: {line[:80]!r}")
        key, text = name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")
        if key in headers:
            if key == "content-length" and headers[key] != text:
                raise MalformedResponse("the response has two different Content-Length headers")
            if key != "content-length":
                text = f"{headers[key]}, {text}"
        headers[key] = text
    return ResponseHead(
        status=int(match[2]),
        reason=(match[3] or b"").decode("latin-1"),
        headers=headers,
        minor_version=int(match[1]),
    )
