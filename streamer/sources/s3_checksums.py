"""Asks S3 for the checksum that it keeps of an object, and of the parts that it was uploaded in.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html: a checksum is of the
whole object (``FULL_OBJECT``), or of its parts' checksums (``COMPOSITE``), which then have to be asked for.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import botocore.exceptions as aws
from botocore.parsers import ResponseParserError

from streamer.checkpoint.stored import StoredChecksum, StoredPart
from streamer.errors import BadResponseError, ObjectChangedError
from streamer.sources.base import ObjectInfo

__all__ = ["ask_checksum"]

#: An object has one checksum in S3. Should another store give several, the first of these that it has counts:
#: CRCs can be put together from ranges, and the first needs no package.
_PREFERENCE = ("CRC32", "CRC64NVME", "CRC32C", "SHA256", "SHA1")
_FIELD = "Checksum"
#: Some stores do not know ``?attributes`` and would send the whole object; more than a page of parts never comes.
_MOST_ANSWER_BYTES = 4 << 20
_NOT_KNOWN = frozenset(
    {"NotImplemented", "MethodNotAllowed", "InvalidRequest", "InvalidArgument", "UnsupportedOperation"}
)


async def ask_checksum(api: Any, where: Mapping[str, Any], item: ObjectInfo, label: str) -> StoredChecksum:
    """Return what the store keeps, with HeadObject and, for a composite checksum, GetObjectAttributes.

    Args:
        api: an S3 client of aiobotocore.
        where: bucket, key, version and what else every request of this object says.
        item: its size and pin must still be those.
        label: names it in messages.

    Raises:
        ObjectChangedError: the object is not the pinned one any more.
        BadResponseError: the answer is not in S3's form.
        botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError: for the caller to translate.
    """
    try:
        head = await api.head_object(**where, ChecksumMode="ENABLED")
    except aws.ClientError as error:
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") not in (400, 501):
            raise
        await api.head_object(**where)  # credentials that have expired are refused with 400 as well: this then raises
        return StoredChecksum(None, why_not="the store refuses requests with x-amz-checksum-mode")
    _compare(item, head.get("ETag"), head["ContentLength"], label)
    found = {
        name.removeprefix(_FIELD): value
        for name, value in head.items()
        if name.startswith(_FIELD) and name != "ChecksumType"
    }
    if not found:
        return StoredChecksum(None, why_not="the store keeps no checksum of it")
    algorithm = min(found, key=lambda name: _PREFERENCE.index(name) if name in _PREFERENCE else len(_PREFERENCE))
    value, _, count = found[algorithm].partition("-")
    digest = _decode(value, label)
    kind = head.get("ChecksumType")
    if kind is None and (count or ("-" in head.get("ETag", "") and algorithm != "CRC64NVME")):
        kind = "COMPOSITE"  # not every store says; what was uploaded in parts has such an ETag
    if kind != "COMPOSITE":
        return StoredChecksum(algorithm, (StoredPart(0, item.size, digest),))
    return await _ask_parts(api, where, item, label, algorithm, digest)


async def _ask_parts(
    api: Any, where: Mapping[str, Any], item: ObjectInfo, label: str, algorithm: str, digest: bytes
) -> StoredChecksum:
    api.meta.events.register_first(
        "before-sign.s3.GetObjectAttributes", _limit_answer, unique_id="s3stream-limit-attributes"
    )
    parts: list[StoredPart] = []
    position, marker = 0, 0
    while True:
        try:
            page = await api.get_object_attributes(
                **where, ObjectAttributes=["ETag", "ObjectParts"], MaxParts=1000, PartNumberMarker=marker
            )
        except aws.ClientError as error:
            if (why := _why_refused(error, item)) is None:
                raise
            return StoredChecksum(algorithm, why_not=why)
        except ResponseParserError:
            return StoredChecksum(algorithm, why_not="the store does not know GetObjectAttributes")
        _compare(item, page.get("ETag"), item.size, label)
        listed = page.get("ObjectParts", {})
        for part in listed.get("Parts", ()):
            if _FIELD + algorithm not in part:
                return StoredChecksum(algorithm, why_not="the store does not give the checksums of its parts")
            end = position + part["Size"]
            parts.append(StoredPart(position, end, _decode(part[_FIELD + algorithm], label)))
            position = end
        if not listed.get("IsTruncated"):
            break
        following = int(listed.get("NextPartNumberMarker") or 0)
        if following <= marker:
            raise BadResponseError("the list of its parts has no end: it continues where it has been", url=label)
        marker = following
    if not parts:
        return StoredChecksum(algorithm, why_not="the store does not give the checksums of its parts")
    if position != item.size:
        raise BadResponseError(f"its parts have {position} bytes, and it has {item.size}", url=label)
    return StoredChecksum(algorithm, tuple(parts), of_parts=digest)


def _limit_answer(request: Any, **_: Any) -> None:
    request.headers["Range"] = f"bytes=0-{_MOST_ANSWER_BYTES - 1}"


def _why_refused(error: aws.ClientError, item: ObjectInfo) -> str | None:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = error.response.get("Error", {}).get("Code", "")
    if status == 403 and code == "AccessDenied":
        # https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObjectAttributes.html: a version's are another's.
        permission = "s3:GetObjectAttributes" if item.version is None else "s3:GetObjectVersionAttributes"
        return f"the checksums of its parts need the permission {permission}"
    if status in (405, 501) or code in _NOT_KNOWN:
        return "the store does not know GetObjectAttributes"
    return None


def _compare(item: ObjectInfo, etag: str | None, size: int, label: str) -> None:
    pin = (item.pin or "").strip('"')  # GetObjectAttributes leaves the quotes out
    if size != item.size or (pin and etag and etag.strip('"') != pin):
        raise ObjectChangedError(
            "the object changed during the load", url=label, hint="load again when nobody writes to it"
        )


def _decode(value: str, label: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadResponseError(f"its checksum {value[:100]!r} is not in base64", url=label) from error
