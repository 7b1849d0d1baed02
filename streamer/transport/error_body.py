"""The body of a refusal: collected to its end, which it states in one of three ways, or cut."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["MAX_ERROR_BODY_BYTES", "ErrorBody"]

#: Error documents are a few hundred bytes; more than this is not read.
MAX_ERROR_BODY_BYTES = 64 << 10
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;|$)")


class ErrorBody:
    """Takes the bytes of one error document.

    AWS sends its documents in chunks (RFC 9112, section 7.1) on a connection that stays open, so waiting for
    the close would end in a timeout, and the refusal would be taken for a stalled response.

    Args:
        status, headers: of the response; names in lower case.
    """

    __slots__ = ("_is_chunked", "_length", "_raw", "is_exact")

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self._raw = bytearray()
        self._is_chunked = headers.get("transfer-encoding", "").strip().lower() == "chunked"
        announced = headers.get("content-length", "")
        self._length = int(announced) if announced.isdigit() and len(announced) < 19 else None
        if status in (204, 304):
            self._length, self._is_chunked = 0, False
        self.is_exact = False
        """Whether it ended where it said, with nothing behind it."""

    def feed(self, data: bytes) -> bool:
        """Add bytes; return whether no more are wanted."""
        self._raw += data
        if self._is_chunked:
            _, end = _dechunked(self._raw)
        else:
            end = self._length if self._length is not None and len(self._raw) >= self._length else None
        self.is_exact = end == len(self._raw)
        return end is not None or len(self._raw) >= MAX_ERROR_BODY_BYTES

    @property
    def content(self) -> bytes:
        """What has arrived, decoded, cut to `MAX_ERROR_BODY_BYTES`."""
        raw = _dechunked(self._raw)[0] if self._is_chunked else self._raw
        return bytes(raw[:MAX_ERROR_BODY_BYTES])


def _dechunked(raw: bytearray) -> tuple[bytearray, int | None]:
    """Return the content of the chunks so far, and where the last one ends, if it is there."""
    content, position = bytearray(), 0
    while True:
        end = raw.find(b"\r\n", position)
        if end < 0:
            return content, None
        stated = _CHUNK_SIZE.match(raw, position, end)
        if stated is None:
            return content, len(raw) + 1  # not chunks: no more of it is wanted, nor of the connection
        size, position = int(stated[1], 16), end + 2
        if not size:
            end = raw.find(b"\r\n", position)  # trailers are not used, so one that is there counts as excess
            return content, end + 2 if end >= 0 else None
        content += raw[position : position + size]
        position += size + 2
        if position > len(raw):
            return content, None
