"""Errors carry their facts, survive pickling between ranks, and are what callers already catch."""

from __future__ import annotations

import inspect
import pickle

import pytest

from streamer import errors
from streamer.errors import (
    CheckpointError,
    ConfigError,
    CredentialsError,
    MissingParametersError,
    ObjectNotFoundError,
    SourceError,
    StreamError,
    shorten,
)

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, StreamError)]


def test_tree_in_the_docstring_is_complete() -> None:
    assert errors.__doc__
    for kind in KINDS:
        assert kind.__name__ in errors.__doc__
        assert kind.__doc__


@pytest.mark.parametrize("kind", KINDS)
def test_pickles_with_everything(kind: type[StreamError]) -> None:
    error = kind("what happened", hint="what to try")
    if isinstance(error, SourceError):
        error.url, error.start, error.end, error.status, error.attempts = "s3://b/k", 0, 10, 503, 3
    if isinstance(error, MissingParametersError):
        error.names = ("a", "b")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_builtin_bases() -> None:
    assert issubclass(ObjectNotFoundError, FileNotFoundError)
    assert issubclass(CredentialsError, PermissionError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(CheckpointError, ValueError)


def test_source_error_says_where_what_and_how_often() -> None:
    error = SourceError(
        "the store kept refusing",
        hint="try later",
        url="s3://b/k",
        start=5,
        end=15,
        status=503,
        code="SlowDown",
        request_id="ID",
        attempts=4,
        elapsed_seconds=2.25,
    )
    assert str(error) == (
        "s3://b/k bytes 5-14: the store kept refusing "
        "[status 503, SlowDown, request id ID, 4 attempts in 2.2 s] (try later)"
    )


def test_shorten() -> None:
    assert shorten(["a", "b"]) == "a, b"
    assert shorten(list("abcdefghij"), 3) == "a, b, c and 7 more"
