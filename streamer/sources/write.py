"""Puts a small object beside a checkpoint."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from streamer.config import StreamConfig
from streamer.errors import ConfigError, SourceError
from streamer.sources.open import local_path, open_source, plain_url

__all__ = ["write_object"]


def write_object(url: str, key: str, body: bytes, config: StreamConfig) -> None:
    """Write `body` below `url`, replacing what is there.

    Raises:
        ConfigError: only S3 and local folders can be written to.
        SourceError: the store refuses.
    """
    url = plain_url(url)
    folder = local_path(url)
    if folder is not None:
        _write_file(folder / key, body)
        return
    if not url.startswith("s3://"):
        raise ConfigError(f"{url} cannot be written to", hint="use --output FILE and upload the file yourself")
    asyncio.run(_put(url, key, body, config))


def _write_file(path: Path, body: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            unfinished.write_bytes(body)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise SourceError(error.strerror or str(error), url=str(path)) from error


async def _put(url: str, key: str, body: bytes, config: StreamConfig) -> None:
    from streamer.sources.s3 import S3Source

    source = open_source(url, config)
    assert isinstance(source, S3Source)
    try:
        await source.put(key, body)
    finally:
        await source.close()
