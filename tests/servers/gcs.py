"""A GCS server of our own, on the machinery of `ObjectServer`: the JSON API's list, get and media, and its refusals.

Generations are those of the objects' versions; those that were replaced are only kept where `is_versioned`. A
Content-Encoding is served as GCS serves it: decompressed and whole, unless the request accepts gzip.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import ssl
from typing import Any
from urllib.parse import unquote

import awscrt.checksums

from tests.servers.messages import Request, Response, Stored
from tests.servers.object_server import ObjectServer

__all__ = ["GcsServer", "gcs_error"]

_PATH = re.compile(r"/(?P<media>download/)?storage/v1/b/(?P<bucket>[^/]+)/o(?:/(?P<name>[^/]+))?")
_FIRST_GENERATION = 1_700_000_000_000_000


class GcsServer(ObjectServer):
    """See `ObjectServer`.

    Attributes:
        tokens: bearer tokens that are accepted; None accepts everybody.
        encodings: by bucket and key, the Content-Encoding.
        payer: the project that must be named as the one who pays.
        honours_generations: whether reads are held against the generations that they name.
    """

    def __init__(self, *, tokens: set[str] | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.tokens = tokens
        self.encodings: dict[tuple[str, str], str] = {}
        self.payer: str | None = None
        self.honours_generations = True
        self.accepted_encodings: list[str] = []
        super().__init__(tls=tls)

    def generation(self, bucket: str, key: str) -> str:
        return _generation(self.objects[bucket][key])

    def _kind(self, request: Request) -> str:
        if not request.key:
            return "LIST"
        return "GET" if request.query.get("alt") == ["media"] else "STAT"

    def route(self, request: Request) -> Response:
        path = re.sub("^https?://[^/]+", "", request.target).partition("?")[0]
        match = _PATH.fullmatch(path)
        if match is None or request.method != "GET":
            return gcs_error(404, "notFound", "no such method")
        request.bucket, request.key = unquote(match["bucket"]), unquote(match["name"] or "")
        refusal = self._refuse(request)
        if refusal is not None:
            return refusal
        if not request.key:
            return self._page(request)
        stored = self.objects[request.bucket].get(request.key)
        wanted = request.query.get("generation", [""])[0]
        if wanted and self.honours_generations and (stored is None or _generation(stored) != wanted):
            version = f"version-{int(wanted) - _FIRST_GENERATION}"
            stored = self._versions.get(version) if self.is_versioned else None
        if stored is None:
            return gcs_error(404, "notFound", f"No such object: {request.bucket}/{request.key}")
        matching = request.query.get("ifGenerationMatch", [""])[0]
        if matching and self.honours_generations and _generation(stored) != matching:
            return gcs_error(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")
        if self._kind(request) == "STAT":
            return _document(self._resource(request.bucket, request.key, stored))
        return self._media(request, stored)

    def _refuse(self, request: Request) -> Response | None:
        authorization = request.headers.get("authorization", "")
        if self.tokens is not None:
            if not authorization:
                what = "Anonymous caller does not have storage.objects.get access to the object."
                return gcs_error(401, "required", what)
            if authorization.removeprefix("Bearer ") not in self.tokens:
                return gcs_error(401, "authError", "Invalid Credentials")
        if self.payer is not None and request.query.get("userProject") != [self.payer]:
            return gcs_error(400, "required", "Bucket is requester pays bucket but no user project provided.")
        if request.bucket not in self.objects:
            return gcs_error(404, "notFound", "The specified bucket does not exist.")
        return None

    def _resource(self, bucket: str, key: str, stored: Stored) -> dict[str, Any]:
        resource = {"name": key, "size": str(stored.size), "generation": _generation(stored), "metageneration": "1"}
        if (bucket, key) in self.encodings:
            resource["contentEncoding"] = self.encodings[bucket, key]
        assert isinstance(stored.content, bytes)
        resource["crc32c"] = base64.b64encode(awscrt.checksums.crc32c(stored.content).to_bytes(4, "big")).decode()
        return resource

    def _page(self, request: Request) -> Response:
        prefix, delimiter, after = (request.query.get(name, [""])[0] for name in ("prefix", "delimiter", "pageToken"))
        size = min(self.page_size, int(request.query.get("maxResults", ["1000"])[0]))
        entries: dict[str, Stored | None] = {}
        for key, stored in sorted(self.objects[request.bucket].items()):
            if key.startswith(prefix):
                folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                entries[prefix + folder + found if found else key] = None if found else stored
        names = [name for name in entries if name > after]
        page: dict[str, Any] = {"kind": "storage#objects"}
        if names[size:]:
            page["nextPageToken"] = names[size - 1]
        items = [(name, entry) for name in names[:size] if (entry := entries[name]) is not None]
        if items:
            page["items"] = [self._resource(request.bucket, name, entry) for name, entry in items]
        if len(items) < len(names[:size]):
            page["prefixes"] = [name for name in names[:size] if entries[name] is None]
        return _document(page)

    def _media(self, request: Request, stored: Stored) -> Response:
        assert isinstance(stored.content, bytes)
        self.accepted_encodings.append(request.headers.get("accept-encoding", ""))
        encoding = self.encodings.get((request.bucket, request.key))
        headers = {"X-Goog-Generation": _generation(stored), "X-GUploader-UploadID": "TESTUPLOAD"}
        given = request.headers.get("range")
        if encoding == "gzip" and "gzip" not in self.accepted_encodings[-1]:
            body = gzip.decompress(stored.content)
            return Response(200, {**headers, "Content-Length": str(len(body))}, body, 0, len(body))
        if encoding is not None:
            headers["Content-Encoding"] = encoding
        # What faults of S3's server go by; reads do not.
        headers["ETag"] = stored.etag
        if given is None:
            return Response(200, {**headers, "Content-Length": str(stored.size)}, stored.content, 0, stored.size)
        first, _, last = given.removeprefix("bytes=").partition("-")
        start, end = int(first), min(stored.size, int(last) + 1)
        if start >= stored.size:
            return gcs_error(416, "requestedRangeNotSatisfiable", "Request range not satisfiable")
        headers["Content-Length"] = str(end - start)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{stored.size}"
        return Response(206, headers, stored.content, start, end - start)


def gcs_error(status: int, reason: str, message: str, **headers: str) -> Response:
    """An error document of the JSON API."""
    error = {"code": status, "message": message, "errors": [{"domain": "global", "reason": reason, "message": message}]}
    response = _document({"error": error})
    response.status = status
    response.headers["X-GUploader-UploadID"] = "TESTUPLOAD"
    response.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
    return response


def _document(document: dict[str, Any]) -> Response:
    body = json.dumps(document).encode()
    headers = {"Content-Type": "application/json; charset=UTF-8", "Content-Length": str(len(body))}
    return Response(200, headers, body, 0, len(body))


def _generation(stored: Stored) -> str:
    return str(_FIRST_GENERATION + int(stored.version.removeprefix("version-")))
