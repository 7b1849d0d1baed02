"""What the object server stores, is asked and answers, and how a fault changes the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

REASONS = {200: "OK", 206: "Partial Content", 400: "Bad Request", 403: "Forbidden", 404: "Not Found"}


@dataclass
class Stored:
    """An object: bytes in memory, or a file. And its version, which is shown by a bucket with versioning."""

    content: bytes | Path
    etag: str
    size: int
    version: str = ""


@dataclass
class Request:
    method: str
    bucket: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    target: str


@dataclass
class Response:
    """What will be sent; faults change it."""

    status: int
    headers: dict[str, str]
    body: bytes | Path = b""
    start: int = 0
    count: int = 0
    extra: bytes = b""
    """Sent after the body, announced nowhere."""
    head_bytes: int | None = None
    """Only this much of the head is sent; then `reset_after` or `stall_after` says what happens, else a close."""
    cut_after: int | None = None
    """Close the connection, cleanly, after this many body bytes."""
    reset_after: int | None = None
    """Reset the connection after this many body bytes; -1: before the head."""
    stall_after: int | None = None
    """Send nothing more after this many body bytes; -1: before the head."""
    bytes_per_second: float | None = None
    delay_seconds: float = 0.0


@dataclass
class Fault:
    """Changes responses to matching requests.

    Args:
        change: edits the response in place, or returns another.
        key: part of the key that must match; "" matches all.
        times: how often; None for ever.
        skip: matching requests to let pass first.
        method: GET, HEAD, LIST or ATTRIBUTES.
        end: where the requested range must end, half open. A read that is resumed keeps its end.
    """

    change: Callable[[Request, Response], Response | None]
    key: str = ""
    times: int | None = 1
    skip: int = 0
    method: str = "GET"
    end: int | None = None

    def matches(self, kind: str, request: Request) -> bool:
        if self.method != kind or self.key not in request.key or self.times == 0:
            return False
        return self.end is None or request.headers.get("range", "").endswith(f"-{self.end - 1}")


def error_response(status: int, code: str, message: str = "", **headers: str) -> Response:
    """An S3 error document."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>".encode()
    fields = {
        "Content-Type": "application/xml",
        "Content-Length": str(len(body)),
        "x-amz-request-id": "TESTREQUEST",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return Response(status, fields, body, 0, len(body))


def parse_request(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    path, _, query = target.partition("?")
    if path.startswith(("http://", "https://")):  # servers must take this too: section 3.2.2 of RFC 9112
        path = path.split("/", 3)[3]
    bucket, _, key = path.lstrip("/").partition("/")
    return Request(method, unquote(bucket), unquote(key), parse_qs(query, keep_blank_values=True), headers, target)
