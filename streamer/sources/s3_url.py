"""What an ``s3://`` URL names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from streamer.errors import ConfigError

__all__ = ["S3Location", "parse_s3_url"]

_ARN = re.compile(r"arn:[^:/]*:s3[^:/]*:[^/]*[:/](?:accesspoint|outpost)[:/][^/]+(?:/accesspoint/[^/]+)?")


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket (or access point ARN) and the key prefix below it, "" or ending in ``/``."""

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def parse_s3_url(url: str) -> S3Location:
    """Split ``s3://bucket/prefix``; keys are taken literally, so ``%`` or ``#`` need no escaping.

    ``s3://bucket/model`` and ``s3://bucket/model/`` are the same folder, and never match ``model-v2``.
    A doubled slash is part of the key.

    Raises:
        ConfigError: there is no bucket, or there are keys in front of it.
    """
    rest = url.removeprefix("s3://")
    arn = _ARN.match(rest)
    bucket, _slash, prefix = (arn[0], "/", rest[arn.end() + 1 :]) if arn else rest.partition("/")
    if not bucket:
        raise ConfigError(f"{url!r} names no bucket", hint="write s3://bucket/folder")
    if "@" in bucket:
        raise ConfigError(
            "an s3:// URL has no place for keys", hint="write s3://bucket/folder; keys are found as for the AWS CLI"
        )
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    return S3Location(bucket, prefix)
