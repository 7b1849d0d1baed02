"""Digests of a checkpoint, block by block, so that any part of it can be checked that holds whole blocks.

The manifest is an object beside the weights. Each safetensors file is cut into stretches: its header, then each
tensor; each stretch into blocks of equal length, the last one shorter. A block's digest is SHA-256, shortened to
128 bits: OpenSSL computes it faster than any other that Python brings (1.9 GiB/s on the machine this was written
on, BLAKE2b 1.3), and whoever could forge it could as well replace the manifest. A tensor's own digest is that of
its blocks' digests.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamer.errors import CheckpointError

__all__ = ["MANIFEST_KEY", "FileDigests", "Manifest", "Stretch", "block_digest", "parse_manifest"]

MANIFEST_KEY = "s3stream-manifest.json"
HEADER = ""
"""The name of the stretch before the first tensor."""
MAX_MANIFEST_BYTES = 1 << 30

_FORMAT = 1
_ALGORITHM = "sha256-128"
_DIGEST_BYTES = 16


def block_digest(parts: Iterable[memoryview | bytes]) -> bytes:
    """Return the digest of a block that lies in `parts`, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()[:_DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A tensor, or a header, of one file.

    Attributes:
        name: the tensor's; empty for a header.
        start, end: bytes in the file, half open.
        digests: of its blocks, joined.
    """

    name: str
    start: int
    end: int
    digests: bytes

    def block(self, number: int) -> bytes:
        return self.digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES]

    @property
    def digest(self) -> str:
        """Of the whole, in hexadecimal."""
        return block_digest([self.digests]).hex()


@dataclass(frozen=True, slots=True)
class FileDigests:
    """One file: its size and identity when it was read, and its stretches in order, which cover it.

    Attributes:
        pin, version: as `streamer.sources.base.ObjectInfo` has them. For people: loads go by the digests.
    """

    size: int
    pin: str | None
    stretches: tuple[Stretch, ...]
    version: str | None = None

    def covering(self, start: int, end: int, block_bytes: int) -> tuple[int, int]:
        """Return the smallest range of whole blocks that holds ``[start, end)``."""
        first, last = self._at(start), self._at(end - 1)
        low = first.start + (start - first.start) // block_bytes * block_bytes
        high = last.start + -(-(end - last.start) // block_bytes) * block_bytes
        return low, min(high, last.end)

    def blocks(self, start: int, end: int, block_bytes: int) -> Iterable[tuple[Stretch, int, int, int]]:
        """Yield ``(stretch, number, start, end)`` of every block of a range that `covering` returned."""
        position = start
        while position < end:
            stretch = self._at(position)
            number = (position - stretch.start) // block_bytes
            stop = min(stretch.start + (number + 1) * block_bytes, stretch.end)
            yield stretch, number, position, stop
            position = stop

    def _at(self, position: int) -> Stretch:
        return self.stretches[bisect_right(self.stretches, position, key=lambda stretch: stretch.start) - 1]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `parse_manifest` reads and `to_json` writes.

    Attributes:
        block_bytes: length of a block.
        files: the weights.
        others: digests of the files that are not weights, such as the configuration and the tokenizer, in
            hexadecimal: they say which revision of the model this is.
    """

    block_bytes: int
    files: Mapping[str, FileDigests]
    others: Mapping[str, str]

    def to_json(self) -> bytes:
        document = {
            "format": _FORMAT,
            "algorithm": _ALGORITHM,
            "block_bytes": self.block_bytes,
            "files": {
                key: {
                    "size": file.size,
                    "etag": file.pin,
                    "version": file.version,
                    "tensors": [
                        {
                            "name": stretch.name,
                            "start": stretch.start,
                            "bytes": stretch.end - stretch.start,
                            "digest": stretch.digest,
                            "blocks": base64.b64encode(stretch.digests).decode(),
                        }
                        for stretch in file.stretches
                    ],
                }
                for key, file in self.files.items()
            },
            "others": dict(self.others),
        }
        return json.dumps(document, separators=(",", ":")).encode()


def parse_manifest(body: bytes, label: str) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    try:
        document: Any = json.loads(body)
        if document["format"] != _FORMAT or document["algorithm"] != _ALGORITHM:
            raise CheckpointError(
                f"{label} is a manifest of another kind ({document['format']!r}, {document['algorithm']!r})",
                hint="write it anew with `s3stream verify URL --write`",
            )
        block_bytes = _positive(document["block_bytes"])
        files = {
            str(key): FileDigests(
                _positive(file["size"]),
                file["etag"],
                _stretches(file["tensors"], file["size"], block_bytes),
                file.get("version"),
            )
            for key, file in document["files"].items()
        }
        others = {str(key): str(digest) for key, digest in document["others"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{label} is no manifest of s3stream, or damaged ({type(error).__name__}: {error})",
            hint="write it anew with `s3stream verify URL --write`",
        ) from error
    return Manifest(block_bytes, files, others)


def _positive(value: Any) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError(f"{value!r} is not a positive number")
    return value


def _stretches(entries: Sequence[Any], size: int, block_bytes: int) -> tuple[Stretch, ...]:
    stretches, position = [], 0
    for entry in entries:
        length = _positive(entry["bytes"])
        digests = base64.b64decode(entry["blocks"], validate=True)
        stretch = Stretch(str(entry["name"]), entry["start"], entry["start"] + length, digests)
        if stretch.start != position or len(digests) != -(-length // block_bytes) * _DIGEST_BYTES:
            raise ValueError(f"the blocks of {stretch.name or 'a header'} do not fit it")
        if stretch.digest != entry["digest"]:
            raise ValueError(f"the digest of {stretch.name or 'a header'} is not that of its blocks")
        stretches.append(stretch)
        position = stretch.end
    if position != size:
        raise ValueError(f"the blocks cover {position} of {size} bytes")
    return tuple(stretches)
