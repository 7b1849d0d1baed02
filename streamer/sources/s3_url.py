"""What an ``s3://`` URL names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from streamer.errors import ConfigError

__all__ = ["S3Location", "parse_s3_url"]

#: Of access points: of a region, of many (which name no region), of S3 Object Lambda; and of Outposts.
#: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html
_ARN = re.compile(
    r"arn:[^:/]*:(?:s3(?:-object-lambda)?:(?P<region>[^:/]*):[^:/]*:accesspoint[:/][^:/]+"
    r"|s3-outposts:[^:/]*:[^:/]*:outpost[:/][^:/]+[:/]accesspoint[:/][^:/]+)(?=/|$)"
)
#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/directory-bucket-naming-rules.html; access points have "xa".
_DIRECTORY_SUFFIXES = ("--x-s3", "--xa-s3")


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket (or access point ARN) and the key prefix below it, "" or ending in ``/``."""

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory bucket (S3 Express One Zone), or an access point of one."""
        return self.bucket.endswith(_DIRECTORY_SUFFIXES)

    @property
    def is_multi_region(self) -> bool:
        """Whether it is a Multi-Region Access Point."""
        arn = _ARN.match(self.bucket)
        return arn is not None and arn["region"] == ""


def parse_s3_url(url: str) -> S3Location:
    """Split ``s3://bucket/prefix``; keys are taken literally, so ``%`` or ``#`` need no escaping.

    ``s3://bucket/model`` and ``s3://bucket/model/`` are the same folder, and never match ``model-v2``.
    A doubled slash is part of the key.

    Raises:
        ConfigError: there is no bucket, there are keys in front of it, or an ARN is not one of an access point.
    """
    rest = url.removeprefix("s3://")
    arn = _ARN.match(rest)
    bucket, _slash, prefix = (arn[0], "/", rest[arn.end() + 1 :]) if arn else rest.partition("/")
    if bucket.startswith("arn:") and arn is None:
        raise ConfigError(
            f"{url!r} is no ARN of an access point",
            hint="write s3://bucket/folder, or s3://arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME/folder",
        )
    if not bucket:
        raise ConfigError(f"{url!r} names no bucket", hint="write s3://bucket/folder")
    if "@" in bucket:
        raise ConfigError(
            "an s3:// URL has no place for keys", hint="write s3://bucket/folder; keys are found as for the AWS CLI"
        )
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    return S3Location(bucket, prefix)
