"""The checksums that the object server keeps of an upload, and how it is asked for them."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.servers.messages import Request, Response


def _crt(name: str, body: bytes) -> int:
    import awscrt.checksums  # benchmarks run this server where it is not installed

    found: int = getattr(awscrt.checksums, name)(body)
    return found


#: Not those of the library: what it computes is tested against these.
DIGESTS: dict[str, Callable[[bytes], bytes]] = {
    "CRC32": lambda body: zlib.crc32(body).to_bytes(4, "big"),
    "CRC32C": lambda body: _crt("crc32c", body).to_bytes(4, "big"),
    "CRC64NVME": lambda body: _crt("crc64nvme", body).to_bytes(8, "big"),
    "SHA1": lambda body: hashlib.sha1(body).digest(),
    "SHA256": lambda body: hashlib.sha256(body).digest(),
    "SHA512": lambda body: hashlib.sha512(body).digest(),
    "XXHASH64": lambda body: bytes(8),
}


@dataclass
class KeptChecksum:
    """Of one object. Tests change it to see what comes of it.

    Attributes:
        value: as it goes into the header.
        parts: size and checksum of each; empty for a checksum of the whole object.
        are_parts_known: whether the store gives the parts' checksums.
    """

    algorithm: str
    value: str
    parts: list[tuple[int, str]] = field(default_factory=list)
    are_parts_known: bool = True

    @property
    def headers(self) -> dict[str, str]:
        kind = "COMPOSITE" if self.parts else "FULL_OBJECT"
        return {f"x-amz-checksum-{self.algorithm.lower()}": self.value, "x-amz-checksum-type": kind}


def keep(algorithm: str, body: bytes, part_bytes: Sequence[int] = ()) -> KeptChecksum:
    """Compute what S3 keeps of `body`, uploaded at once or in parts of these sizes."""
    digest = DIGESTS[algorithm]
    if not part_bytes:
        return KeptChecksum(algorithm, base64.b64encode(digest(body)).decode())
    assert sum(part_bytes) == len(body)
    digests, start = [], 0
    for size in part_bytes:
        digests.append(digest(body[start : start + size]))
        start += size
    value = f"{base64.b64encode(digest(b''.join(digests))).decode()}-{len(digests)}"
    parts = [(size, base64.b64encode(each).decode()) for size, each in zip(part_bytes, digests, strict=True)]
    return KeptChecksum(algorithm, value, parts)


def attributes_response(request: Request, kept: KeptChecksum, etag: str, page_size: int) -> Response:
    """Answer GetObjectAttributes."""
    after = int(request.headers.get("x-amz-part-number-marker", "0"))
    size = min(page_size, int(request.headers.get("x-amz-max-parts", "1000")))
    numbered = list(enumerate(kept.parts, 1))[after:]
    tag = f"Checksum{kept.algorithm}"
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><Size>{nbytes}</Size><{tag}>{value}</{tag}></Part>"
        for number, (nbytes, value) in numbered[:size]
        if kept.are_parts_known
    )
    body = (
        f"<?xml version='1.0' encoding='UTF-8'?><GetObjectAttributesResponse>"
        f"<ETag>{etag.strip(chr(34))}</ETag><ObjectParts>"
        f"<IsTruncated>{'true' if numbered[size:] else 'false'}</IsTruncated><MaxParts>{size}</MaxParts>"
        f"<NextPartNumberMarker>{after + len(numbered[:size])}</NextPartNumberMarker>"
        f"<PartsCount>{len(kept.parts)}</PartsCount>{parts}</ObjectParts></GetObjectAttributesResponse>"
    ).encode()
    return Response(200, {"Content-Type": "application/xml", "Content-Length": str(len(body))}, body, 0, len(body))
