"""A response is guilty until proven right."""

from __future__ import annotations

import pytest

from streamer.transport.checks import (
    Expected,
    StoreError,
    WrongResponse,
    check_range_response,
    parse_store_error,
    retry_after,
)

ASKED = Expected(100, 200, 1000, '"tag"')
GOOD = {"content-range": "bytes 100-199/1000", "content-length": "100", "etag": '"tag"'}


def check(status: int = 206, expected: Expected = ASKED, **changes: str | None) -> None:
    headers = {**GOOD, **{name.replace("_", "-"): value for name, value in changes.items()}}
    check_range_response(expected, status, {name: value for name, value in headers.items() if value is not None})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"etag": None},
        {"etag": 'W/"tag"'},
        {"content_length": None},
        {"content_range": "bytes 100-199/*"},
        {"content_encoding": "identity"},
        {"content_encoding": ""},
    ],
)
def test_right(changes: dict[str, str | None]) -> None:
    check(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"content_range": None}, "no Content-Range"),
        ({"content_range": "bytes 101-200/1000"}, "covers bytes 101-200, not 100-199"),
        ({"content_range": "bytes 100-198/1000"}, "covers bytes 100-198"),
        ({"content_range": "bytes 100-200/1000"}, "covers bytes 100-200"),
        ({"content_range": "bytes 100-199/1001"}, "has 1001 bytes, not 1000"),
        ({"content_range": "bytes */1000"}, "Content-Range is"),
        ({"content_range": "items 100-199/1000"}, "Content-Range is"),
        ({"content_length": "99"}, "Content-Length is 99, not 100"),
        ({"content_length": "101"}, "Content-Length is 101"),
        ({"content_length": "+100"}, "Content-Length is"),
        ({"etag": '"other"'}, "the ETag is"),
        ({"content_encoding": "gzip"}, "encoded .gzip"),
        ({"transfer_encoding": "chunked"}, "chunked"),
    ],
)
def test_wrong(changes: dict[str, str | None], words: str) -> None:
    with pytest.raises(WrongResponse, match=words):
        check(**changes)  # type: ignore[arg-type]


def test_200_is_accepted_only_for_the_whole_object() -> None:
    whole = Expected(0, 1000, 1000, None)
    check(200, whole, content_range=None, content_length="1000")
    with pytest.raises(WrongResponse, match="ignored the range"):
        check(200, content_range=None, content_length="1000")
    with pytest.raises(WrongResponse, match="no Content-Length"):
        check(200, whole, content_range=None, content_length=None)
    with pytest.raises(WrongResponse, match="Content-Length is 41"):  # an error document in a 200
        check(200, whole, content_range=None, content_length="41")


def test_error_documents() -> None:
    body = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please</Message></Error>"
    assert parse_store_error(body, {}) == StoreError("SlowDown", "Please")
    namespaced = b"<Error xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Code>X</Code></Error>"
    assert parse_store_error(namespaced, {"x-amz-bucket-region": "eu-west-1"}) == StoreError("X", "", "eu-west-1")
    assert parse_store_error(b"<html>", {}) == StoreError()
    assert parse_store_error(b"", {}) == StoreError()


def test_entity_bombs_are_not_expanded() -> None:
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><Error><Code>&b;</Code></Error>'
    assert parse_store_error(bomb, {}) == StoreError()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), ("0", 0.0), ("", None), ("Mon, 30 Nov 2026 00:00:00 GMT", None), ("-1", None), ("9" * 9, None)],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value}) == seconds


def test_identity_by_another_header_than_etag() -> None:
    expected = Expected(100, 200, 1000, identity=("x-goog-generation", "17"))
    check_range_response(expected, 206, {**GOOD, "x-goog-generation": "17"})
    check_range_response(expected, 206, GOOD)
    with pytest.raises(WrongResponse, match="x-goog-generation is 18, not 17"):
        check_range_response(expected, 206, {**GOOD, "x-goog-generation": "18"})
