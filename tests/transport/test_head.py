"""The response-head parser: whole, byte by byte, with trailing bytes, and against the standard library."""

from __future__ import annotations

import http.client
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.transport.head import MAX_HEAD_BYTES, HeadParser, MalformedResponse, ResponseHead

CASES = {
    "partial": b'HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nETag: "a:b"\r\n\r\n',
    "no reason": b"HTTP/1.1 200\r\nA: b\r\n\r\n",
    "empty reason": b"HTTP/1.1 200 \r\nA: b\r\n\r\n",
    "no headers": b"HTTP/1.1 204 No Content\r\n\r\n",
    "old": b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n",
    "white space": b"HTTP/1.1 200 OK\r\nX: \t a b \t\r\nY:\r\n\r\n",
    "repeated": b"HTTP/1.1 200 OK\r\nVia: a\r\nVIA: b\r\n\r\n",
    "equal lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
    "after interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nX: y\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n",
}
REFUSED = {
    "not http": b"SSH-2.0-OpenSSH\r\n\r\n",
    "http 2": b"HTTP/2 200\r\n\r\n",
    "two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "folded": b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
    "space before colon": b"HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\n",
    "no colon": b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
    "empty name": b"HTTP/1.1 200 OK\r\n: x\r\n\r\n",
    "bare newline": b"HTTP/1.1 200 OK\r\nA: b\nContent-Length: 3\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "too many headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 201 + b"\r\n",
    "too long": b"HTTP/1.1 200 OK\r\nA: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n",
}


def parse(raw: bytes) -> tuple[ResponseHead, bytes]:
    parsed = HeadParser().feed(raw)
    assert parsed is not None
    return parsed


@pytest.mark.parametrize("name", CASES)
def test_whole_bytewise_and_with_trailing_bytes(name: str) -> None:
    whole, rest = parse(CASES[name])
    assert rest == b""
    assert parse(CASES[name] + b"body\r\n\r\n") == (whole, b"body\r\n\r\n")
    parser = HeadParser()
    for byte in CASES[name][:-1]:
        assert parser.feed(bytes([byte])) is None
    assert parser.feed(CASES[name][-1:]) == (whole, b"")


@pytest.mark.parametrize("name", [name for name in CASES if name != "after interim"])  # it skips 100 only
def test_agrees_with_the_standard_library(name: str) -> None:
    class Socket:
        def makefile(self, mode: str) -> io.BytesIO:
            return io.BytesIO(CASES[name])

    theirs = http.client.HTTPResponse(Socket())  # type: ignore[arg-type]
    theirs.begin()
    ours, _ = parse(CASES[name])
    assert (ours.status, ours.reason) == (theirs.status, theirs.reason)
    for key, value in ours.headers.items():
        values = [text.strip() for text in theirs.headers.get_all(key, [])]
        assert value == (values[0] if key == "content-length" else ", ".join(values))


def test_values() -> None:
    assert parse(CASES["partial"])[0].headers == {"content-length": "5", "etag": '"a:b"'}
    assert parse(CASES["white space"])[0].headers == {"x": "a b", "y": ""}
    assert parse(CASES["repeated"])[0].headers == {"via": "a, b"}
    assert parse(CASES["after interim"])[0].headers == {"a": "b"}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(MalformedResponse):
        HeadParser().feed(REFUSED[name])


def test_endless_head_is_refused() -> None:
    parser = HeadParser()
    parser.feed(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(MalformedResponse, match="more than"):
        for _ in range(100):
            parser.feed(b"A: " + b"b" * 1000)


@pytest.mark.parametrize(
    ("raw", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: te, close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n\r\n", True),
    ],
)
def test_keep_alive(raw: bytes, keeps: bool) -> None:
    assert parse(raw)[0].keeps_alive is keeps


@given(st.lists(st.binary(max_size=40)))
def test_garbage_parses_or_raises_one_exception(chunks: list[bytes]) -> None:
    parser = HeadParser()
    try:
        for chunk in chunks:
            if parser.feed(chunk) is not None:
                return
    except MalformedResponse:
        return
