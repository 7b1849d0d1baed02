"""Is this response the bytes that were asked for? Pure checks, shared by every transport.

Stock clients return wrong bytes without an error for a 200 that ignores the range, a shifted
``Content-Range``, a shortened 206 and an object replaced between two reads. Here a response is refused
unless it proves that it is the range, of the length, of the object, that was asked for.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Expected", "StoreError", "WrongResponse", "check_range_response", "parse_store_error", "retry_after"]

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")
_LENGTH = re.compile(r"[0-9]{1,19}")


class WrongResponse(ValueError):
    """The response contradicts the request."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a ranged GET asked for: bytes `start` to `end` (half open) of an object of `size` bytes."""

    start: int
    end: int
    size: int
    etag: str | None = None
    identity: tuple[str, str] | None = None
    """A header, in lower case, that tells the object's identity where stores do so by another one than ETag."""


def check_range_response(expected: Expected, status: int, headers: Mapping[str, str]) -> None:
    """Check status and headers of a successful response before a byte of its body is used.

    Args:
        expected: the range asked for and the object it should come from.
        status: 200 or 206; others are errors that the caller has already told apart.
        headers: lower-case names.

    Raises:
        WrongResponse: with a phrase that says what was wrong.
    """
    length = expected.end - expected.start
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "aws-chunked"):
        raise WrongResponse(f"the body is encoded ({encoding}); weights must be stored as they are")
    if headers.get("transfer-encoding", "identity").strip().lower() != "identity":
        raise WrongResponse("the body is chunked, so its length cannot be checked")
    whole = expected.start == 0 and expected.end == expected.size
    content_range = headers.get("content-range")
    if status == 200 and not whole:
        raise WrongResponse("the store ignored the range and sent the whole object")
    if status == 206:
        _check_content_range(expected, content_range)
    announced = headers.get("content-length")
    if announced is not None:
        if not _LENGTH.fullmatch(announced):
            raise WrongResponse(f"Content-Length is {announced!r}")
        if int(announced) != length:
            raise WrongResponse(f"Content-Length is {announced}, not {length}")
    elif status == 200:
        raise WrongResponse("the response has no Content-Length")
    etag = headers.get("etag")
    if expected.etag is not None and etag is not None and not _same_etag(etag, expected.etag):
        raise WrongResponse(f"the ETag is {etag}, not {expected.etag}")
    if expected.identity is not None:
        name, value = expected.identity
        if headers.get(name, value) != value:
            raise WrongResponse(f"{name} is {headers[name]}, not {value}")


def _check_content_range(expected: Expected, value: str | None) -> None:
    if value is None:
        raise WrongResponse("the partial response has no Content-Range")
    match = _CONTENT_RANGE.fullmatch(value.strip())
    if not match:
        raise WrongResponse(f"Content-Range is {value!r}")
    start, last, total = int(match[1]), int(match[2]), match[3]
    if (start, last) != (expected.start, expected.end - 1):
        raise WrongResponse(f"Content-Range covers bytes {start}-{last}, not {expected.start}-{expected.end - 1}")
    # "*" is allowed by RFC 9110, section 14.4: the size is unknown to whoever sent it.
    if total != "*" and int(total) != expected.size:
        raise WrongResponse(f"Content-Range says the object has {total} bytes, not {expected.size}")


def _same_etag(first: str, second: str) -> bool:
    # A proxy that recompresses or rewrites marks ETags weak; the opaque part still identifies the object.
    return first.removeprefix("W/").strip('"') == second.removeprefix("W/").strip('"')


@dataclass(frozen=True, slots=True)
class StoreError:
    """The error document of an S3-like store; fields are empty when it sent none."""

    code: str = ""
    message: str = ""
    region: str = ""


def parse_store_error(body: bytes, headers: Mapping[str, str]) -> StoreError:
    """Read the XML error document in `body`, however broken it is."""
    region = headers.get("x-amz-bucket-region", "")
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:  # entity expansion; no store sends one
        return StoreError(region=region)
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return StoreError(region=region)
    values = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in root}
    return StoreError(
        code=values.get("Code", "")[:100],
        message=values.get("Message", "")[:300],
        region=region or values.get("Region", ""),
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait (RFC 9110, section 10.2.3); dates are not honoured."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdigit() and len(value) < 7 else None
