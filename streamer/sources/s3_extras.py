"""What every request of a bucket must say besides where: who pays for it, and the customer's own key."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from streamer.config import StreamConfig
from streamer.errors import ConfigError

__all__ = ["S3Extras"]

_KEY_BYTES = 32  # AES-256, the only algorithm that S3 has for customers' keys


class S3Extras:
    """Parameters of operations, and the headers that a signed URL wants to be used with.

    Raises:
        ConfigError: ``sse_customer_key_file`` cannot be read or holds no key.
    """

    def __init__(self, config: StreamConfig) -> None:
        payer = {"RequestPayer": "requester"} if config.requester_pays else {}
        key = _read_key(config.sse_customer_key_file) if config.sse_customer_key_file else None
        secret: dict[str, Any] = {} if key is None else {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
        self.for_listing: Mapping[str, Any] = payer
        self.for_objects: Mapping[str, Any] = {**payer, **secret}
        self._headers = {"x-amz-request-payer": "requester"} if payer else {}
        if key is not None:
            # As botocore's handlers make them; see
            # https://docs.aws.amazon.com/AmazonS3/latest/userguide/ServerSideEncryptionCustomerKeys.html
            self._headers["x-amz-server-side-encryption-customer-algorithm"] = "AES256"
            self._headers["x-amz-server-side-encryption-customer-key"] = base64.b64encode(key).decode()
            digest = hashlib.md5(key, usedforsecurity=False).digest()
            self._headers["x-amz-server-side-encryption-customer-key-md5"] = base64.b64encode(digest).decode()

    def headers_for(self, signed_url: str) -> tuple[tuple[str, str], ...]:
        """Return the headers that are part of the signature of `signed_url`; all of them if it has none."""
        query = parse_qs(urlsplit(signed_url).query)
        signed = query.get("X-Amz-SignedHeaders")
        names = signed[0].split(";") if signed else list(self._headers)
        return tuple((name, value) for name, value in self._headers.items() if name in names)


def _read_key(path: str) -> bytes:
    try:
        key = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"sse_customer_key_file {path} cannot be read: {error.strerror}") from error
    if len(key) != _KEY_BYTES:
        raise ConfigError(
            f"sse_customer_key_file {path} has {len(key)} bytes, and a key has {_KEY_BYTES}",
            hint="the file holds the key itself, neither in base64 nor in hexadecimal",
        )
    return key
