"""Options: one place, checked, with errors that name the nearest known one."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from streamer.config import StreamConfig
from streamer.errors import ConfigError
from streamer.option_values import parse_byte_count


def test_defaults_are_valid_and_documented() -> None:
    config = StreamConfig()
    assert StreamConfig.resolve({}, {}) == config
    text = inspect.getsource(StreamConfig)
    for field in dataclasses.fields(StreamConfig):
        after = text.split(f"    {field.name}: ", 1)[1].split("\n", 1)[1]
        assert after.lstrip().startswith('"""'), f"{field.name} is not documented"


def test_environment_then_options() -> None:
    environ = {"S3STREAM_CONCURRENCY": "7", "S3STREAM_REQUEST_BYTES": "4MiB", "S3STREAM_STRICT": "no", "HOME": "/x"}
    config = StreamConfig.resolve({"concurrency": "9", "region": "eu-west-1"}, environ)
    assert (config.concurrency, config.request_bytes, config.strict, config.region) == (9, 4 << 20, False, "eu-west-1")


def test_engine_gives_typed_values() -> None:
    config = StreamConfig.resolve({"buffer_bytes": 1 << 20, "retry_deadline_seconds": 5, "anonymous": True}, {})
    assert (config.buffer_bytes, config.retry_deadline_seconds, config.anonymous) == (1 << 20, 5, True)


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ({"concurency": 3}, {}, "unknown option 'concurency'.*did you mean concurrency?"),
        ({"zzz": 3}, {}, "unknown option 'zzz'.*known options: mode, transport"),
        ({}, {"S3STREAM_BUFFER_BYTE": "3"}, "S3STREAM_BUFFER_BYTE.*did you mean S3STREAM_BUFFER_BYTES?"),
        ({"mode": "lazy"}, {}, "mode must be one of trace, eager, not 'lazy'"),
        ({"concurrency": 0}, {}, "concurrency must be at least 1"),
        ({"concurrency": True}, {}, "concurrency must be int, not True"),
        ({"concurrency": "many"}, {}, "concurrency must be a number, not 'many'"),
        ({"strict": "perhaps"}, {}, "strict must be yes or no"),
        ({"strict": 1}, {}, "strict must be bool"),
        ({"region": 3}, {}, "region must be str or nothing"),
        ({"request_bytes": "8 apples"}, {}, "'8 apples' is not a number of bytes"),
        ({"idle_timeout_seconds": float("nan")}, {}, "positive number of seconds"),
        ({"idle_timeout_seconds": 0}, {}, "positive number of seconds"),
        ({"presign_seconds": 10**6}, {}, "at most 604800"),
        ({"anonymous": True, "profile": "x"}, {}, "contradict each other"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StreamConfig.resolve(options, environ)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("1000", 1000), ("8 MiB", 8 << 20), ("512k", 512 << 10), ("1.5GiB", 3 << 29), ("2GB", 2 * 10**9)],
)
def test_byte_counts(text: str, count: int) -> None:
    assert parse_byte_count(text) == count


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        StreamConfig().concurrency = 3  # type: ignore[misc]
    assert StreamConfig().replace(concurrency=3).concurrency == 3
