"""What a ``gs://`` URL names."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from streamer.errors import ConfigError

__all__ = ["GcsLocation", "parse_gcs_url"]


@dataclass(frozen=True, slots=True)
class GcsLocation:
    """A bucket and the name prefix below it, "" or ending in ``/``."""

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return f"gs://{self.bucket}/{self.prefix}"

    @property
    def listing_path(self) -> str:
        """Of the JSON API (https://cloud.google.com/storage/docs/json_api/v1/objects/list)."""
        return f"/storage/v1/b/{quote(self.bucket, safe='')}/o"

    def object_path(self, key: str) -> str:
        """Of the JSON API; every slash of the name is escaped
        (https://cloud.google.com/storage/docs/request-endpoints#encoding)."""
        return f"{self.listing_path}/{quote(self.prefix + key, safe='')}"


def parse_gcs_url(url: str) -> GcsLocation:
    """Split ``gs://bucket/prefix``; names are taken literally, as for ``s3://``.

    Raises:
        ConfigError: there is no bucket, or there are credentials in front of it.
    """
    bucket, _, prefix = url.removeprefix("gs://").partition("/")
    if not bucket:
        raise ConfigError(f"{url!r} names no bucket", hint="write gs://bucket/folder")
    if "@" in bucket:
        raise ConfigError(
            "a gs:// URL has no place for credentials",
            hint="write gs://bucket/folder; credentials are found as Google's own tools find them",
        )
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    return GcsLocation(bucket, prefix)
