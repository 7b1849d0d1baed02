"""From a URL or path to a source.

``s3stream://bucket/key`` is what fsspec calls ``s3://bucket/key`` when it is to be read by this library
(`streamer.fsspec_protocol`), ``s3stream+gs://`` likewise, so both mean here what they are another name of.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from streamer.config import StreamConfig
from streamer.errors import ConfigError, MissingDependencyError, UnsupportedCheckpointError
from streamer.sources.base import Source
from streamer.sources.gcs_url import parse_gcs_url
from streamer.sources.s3_url import parse_s3_url

__all__ = ["local_path", "open_source", "plain_url", "split_file"]

_ALIASES = {"s3stream": "s3", "s3stream+gs": "gs"}


def plain_url(url: str) -> str:
    """Return `url` with a scheme of our own replaced by the store's."""
    scheme, separator, rest = url.partition("://")
    return f"{_ALIASES[scheme]}://{rest}" if separator and scheme in _ALIASES else url


def split_file(url: str) -> tuple[str, str | None]:
    """Split the URL of a single file of weights into its folder's URL and its name; others stay whole.

    Raises:
        UnsupportedCheckpointError: a file that cannot be streamed.
    """
    folder, _, name = url.rpartition("/")
    if name.endswith(".gguf"):
        raise UnsupportedCheckpointError(
            f"{url} is GGUF, which cannot be streamed",
            hint="download it and give its path to an engine that reads GGUF",
        )
    if not name.endswith(".safetensors"):
        return url, None
    return folder or ("/" if url.startswith("/") else "."), name


def open_source(url: str, config: StreamConfig) -> Source:
    """Return the source for `url`: S3, GCS, local files, or any filesystem of fsspec. Nothing is contacted yet.

    Raises:
        ConfigError: a scheme that is not supported, a malformed URL, or a folder that some ranks were fetched into and
            whose marker is damaged.
        MissingDependencyError: the scheme needs a package that is not installed.
    """
    path = local_path(url)
    if path is not None:
        from streamer.sources.local import LocalSource
        from streamer.sources.partial import PartialSource, find_partial

        partial = find_partial(path)
        source = LocalSource(path, threads=config.concurrency)
        return source if partial is None else PartialSource(source, partial)
    url = plain_url(url)
    scheme = url.partition("://")[0]
    if scheme == "s3":
        try:
            from streamer.sources.s3 import S3Source
        except ImportError as error:
            raise MissingDependencyError(
                f"s3:// URLs need the package {error.name}", hint="pip install aiobotocore"
            ) from error
        return S3Source(parse_s3_url(url), config)
    if scheme in ("gs", "gcs"):
        from streamer.sources.gcs import GcsSource

        return GcsSource(parse_gcs_url("gs://" + url.partition("://")[2]), config)
    if config.pin == "version":
        raise ConfigError(
            f"{url} cannot be read with pin=version", hint="only s3:// and gs:// URLs have versions to pin"
        )
    from streamer.sources.fsspec_source import FsspecSource

    return FsspecSource(url, config)


def local_path(url: str) -> Path | None:
    """Return the path that `url` names on this machine, or None when it is a URL of something else.

    Raises:
        ConfigError: an empty or malformed URL.
    """
    if "://" in url and not url.startswith("file://"):
        return None
    if not url.startswith("file://"):
        if not url:
            raise ConfigError("the URL is empty", hint="write s3://bucket/folder or a path")
        return Path(url).expanduser().absolute()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{url!r} names the host {parts.netloc!r}", hint="write file:///absolute/path")
    return Path(unquote(url.removeprefix("file://" + parts.netloc)))
