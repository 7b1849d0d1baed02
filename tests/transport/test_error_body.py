"""Error documents, in each of the ways in which they state their end, however they are cut into pieces."""

from __future__ import annotations

import pytest

from streamer.transport.error_body import MAX_ERROR_BODY_BYTES, ErrorBody

DOCUMENT = b"<Error><Code>AccessDenied</Code></Error>"
CHUNKS = b"5;name=value\r\n<Erro\r\n23\r\n" + DOCUMENT[5:] + b"\r\n0\r\n\r\n"
CHUNKED = {"transfer-encoding": "chunked"}


@pytest.mark.parametrize("cut", range(len(CHUNKS) + 1))
def test_chunks_are_put_together(cut: int) -> None:
    body = ErrorBody(403, CHUNKED)
    done = body.feed(CHUNKS[:cut])
    assert done == (cut == len(CHUNKS))
    assert DOCUMENT.startswith(body.content)
    assert done or body.feed(CHUNKS[cut:])
    assert body.content == DOCUMENT
    assert body.is_exact


@pytest.mark.parametrize(
    ("headers", "raw", "done", "exact", "content"),
    [
        ({"content-length": "5"}, b"12345", True, True, b"12345"),
        ({"content-length": "5"}, b"1234", False, False, b"1234"),
        ({"content-length": "5"}, b"123456", True, False, b"123456"),
        ({"content-length": "five"}, b"12345", False, False, b"12345"),
        ({}, b"12345", False, False, b"12345"),
        ({}, b"x" * MAX_ERROR_BODY_BYTES, True, False, b"x" * MAX_ERROR_BODY_BYTES),
        (CHUNKED, b"not chunks\r\n", True, False, b""),
        (CHUNKED, b"2\r\nab\r\n0\r\n\r\nmore", True, False, b"ab"),
        (CHUNKED, b"-2\r\nab\r\n", True, False, b""),
        (CHUNKED, b"2\r\nab\r\n3 4\r\nabc\r\n", True, False, b"ab"),
    ],
)
def test_where_a_body_ends(headers: dict[str, str], raw: bytes, done: bool, exact: bool, content: bytes) -> None:
    body = ErrorBody(403, headers)
    assert (body.feed(raw), body.is_exact, body.content) == (done, exact, content)


def test_some_statuses_have_no_body() -> None:
    body = ErrorBody(304, {"content-length": "5"})
    assert body.feed(b"")
    assert body.is_exact
