"""Computes the checksums that S3 keeps, as far as this environment can.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html lists them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from streamer.checkpoint.crc import CRCS, Crc
from streamer.errors import MissingDependencyError, UnsupportedCheckpointError

__all__ = ["Algorithm", "find_algorithm"]

_HASHLIB = {"SHA256": "sha256", "SHA1": "sha1", "SHA512": "sha512", "MD5": "md5"}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One checksum.

    Attributes:
        crc: its arithmetic; None for a hash, which cannot be put together from ranges.
        nbytes: of a digest.
    """

    name: str
    nbytes: int
    crc: Crc | None
    _update: Callable[[memoryview, int], int] | None

    def crc_of(self, parts: Iterable[memoryview]) -> int:
        """Return the CRC of bytes that lie in `parts`, one after the other."""
        assert self._update is not None
        value = 0
        for part in parts:
            value = self._update(part, value)
        return value

    def new_hash(self) -> hashlib._Hash:
        return hashlib.new(_HASHLIB[self.name], usedforsecurity=False)

    def digest_of(self, body: bytes) -> bytes:
        """Return the digest as S3 writes it, before base64."""
        if self.crc is not None:
            return self.crc_of([memoryview(body)]).to_bytes(self.nbytes, "big")
        running = self.new_hash()
        running.update(body)
        return running.digest()


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm that S3 calls `name`.

    Raises:
        MissingDependencyError: it needs awscrt, which is not installed or too old for it.
        UnsupportedCheckpointError: nothing here computes it.
    """
    if name in _HASHLIB:
        return Algorithm(name, hashlib.new(_HASHLIB[name], usedforsecurity=False).digest_size, None, None)
    if name not in CRCS:
        raise UnsupportedCheckpointError(f"s3stream does not compute {name}")
    update: Any = zlib.crc32 if name == "CRC32" else _from_awscrt(name)
    return Algorithm(name, CRCS[name].bits // 8, CRCS[name], update)


def _from_awscrt(name: str) -> Any:
    try:
        import awscrt.checksums

        return getattr(awscrt.checksums, name.lower())
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"{name} needs the package awscrt, 0.27 or newer", hint="pip install 's3stream[checksums]'"
        ) from error
