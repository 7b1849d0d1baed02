"""An S3 object server of our own: counts everything, fails on command, and is fast enough to measure with.

It speaks ListObjectsV2, HEAD, GetObjectAttributes and ranged GET with If-Match, path style. Bodies leave through
``sendfile`` from one thread per connection, so it costs little beside the client that is measured.
Signatures are not checked (SeaweedFS does that in the tests); unsigned requests can be refused.

Run it alone with ``python -m tests.servers.object_server ROOT``: each folder in ROOT is a bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import quote
from xml.sax.saxutils import escape

from tests.servers.checksums import KeptChecksum, attributes_response
from tests.servers.command import answer
from tests.servers.link import Link
from tests.servers.messages import REASONS, Fault, Request, Response, Stored, error_response, parse_request

__all__ = ["Counters", "Fault", "ObjectServer", "Request", "Response", "Stored", "error_response"]


@dataclass
class Counters:
    requests: Counter[str] = field(default_factory=Counter)
    connections: int = 0
    open_connections: int = 0
    most_open_connections: int = 0
    body_bytes: int = 0
    answering: int = 0
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    authorization: list[str] = field(default_factory=list)


class ObjectServer:
    """Serves until `close`; a context manager.

    Args:
        root: folder of buckets; more can be `put` from memory.
        first_byte_seconds, bytes_per_second: of every GET, per connection.
        link_bytes_per_second: of all connections together.
        require_signature: refuse requests without an Authorization header or signed query.
        tls: server context; then the URL is https. It may be exchanged later, for new connections.

    Attributes:
        accept_seconds: how long a new connection waits before anything is read from it.
        is_versioned: the buckets have versioning; what was `put` before keeps its version.
        checksums: by bucket and key, of objects that have one.
        version_checksums: by version, of those that are asked for by it.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        port: int = 0,
        first_byte_seconds: float = 0.0,
        bytes_per_second: float | None = None,
        link_bytes_per_second: float | None = None,
        require_signature: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.objects: dict[str, dict[str, Stored]] = {}
        self.faults: list[Fault] = []
        self.counters = Counters()
        self.bucket_region: str | None = None
        self.page_size = 1000
        self.is_versioned = False
        self._versions: dict[str, Stored] = {}
        self._first_byte_seconds = first_byte_seconds
        self._bytes_per_second = bytes_per_second
        self._link = Link(link_bytes_per_second) if link_bytes_per_second else None
        self._require_signature = require_signature
        self.tls = tls
        self.accept_seconds = 0.0
        self.checksums: dict[tuple[str, str], KeptChecksum] = {}
        self.version_checksums: dict[str, KeptChecksum] = {}
        self._lock = threading.RLock()  # faults call back
        self._stopping = threading.Event()
        self._is_refusing = False
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        if root is not None:
            for path in sorted(root.rglob("*")):
                if path.is_file():
                    bucket, _, key = path.relative_to(root).as_posix().partition("/")
                    self.put_file(bucket, key, path)
        self._listen()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stopping.set()
        self.refuse()

    def refuse(self) -> None:
        """Drop every connection and refuse new ones, until `accept_again`."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            self._is_refusing = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def accept_again(self) -> None:
        if not self._stopping.is_set():
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
            self._is_refusing = False
            self._listen()

    def put(self, bucket: str, key: str, content: bytes) -> None:
        etag = f'"{hashlib.md5(content).hexdigest()}"'
        self._store(bucket, key, content, etag, len(content))

    def put_file(self, bucket: str, key: str, path: Path) -> None:
        status = path.stat()
        etag = f'"{status.st_ino:x}-{status.st_mtime_ns:x}"'
        self._store(bucket, key, path, etag, status.st_size)

    def _store(self, bucket: str, key: str, content: bytes | Path, etag: str, size: int) -> None:
        stored = Stored(content, etag, size, f"version-{len(self._versions) + 1}")
        self.objects.setdefault(bucket, {})[key] = self._versions[stored.version] = stored

    def put_folder(self, bucket: str, prefix: str, folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put_file(bucket, prefix + path.relative_to(folder).as_posix(), path)

    # -- connections ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self.counters.connections += 1
            self.counters.open_connections += 1
            self.counters.most_open_connections = max(
                self.counters.most_open_connections, self.counters.open_connections
            )
            self._connections.add(connection)
        stream = connection
        try:
            if self._is_refusing:  # accepted just before
                return
            self._stopping.wait(self.accept_seconds)
            stream = self.tls.wrap_socket(connection, server_side=True) if self.tls else connection
            with stream:
                with self._lock:  # the wrapped socket has taken the connection over
                    self._connections.discard(connection)
                    self._connections.add(stream)
                received = b""
                while not self._stopping.is_set():
                    while b"\r\n\r\n" not in received:
                        more = stream.recv(65536)
                        if not more:
                            return
                        received += more
                    head, _, received = received.partition(b"\r\n\r\n")
                    if not self._answer(stream, head):
                        return
        except (OSError, ValueError):
            return
        finally:
            with self._lock:
                self.counters.open_connections -= 1
                self._connections -= {connection, stream}
            connection.close()

    def _answer(self, stream: socket.socket, head: bytes) -> bool:
        """Answer one request; return whether the connection stays open."""
        request = parse_request(head)
        response = self.route(request)
        kind = self._kind(request)
        with self._lock:
            self.counters.requests[kind] += 1
            self.counters.authorization.append(request.headers.get("authorization", request.target))
            if kind == "GET":
                self.counters.ranges.append((request.key, response.start, response.start + response.count))
            response = self._apply_faults(kind, request, response)
            self.counters.answering += 1
        try:
            return self._send(stream, request, response)
        finally:
            with self._lock:
                self.counters.answering -= 1

    def _kind(self, request: Request) -> str:
        if "attributes" in request.query:
            return "ATTRIBUTES"
        return "LIST" if request.method == "GET" and not request.key else request.method

    def _apply_faults(self, kind: str, request: Request, response: Response) -> Response:
        for fault in self.faults:
            if not fault.matches(kind, request):
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            if fault.times is not None:
                fault.times -= 1
            return fault.change(request, response) or response
        return response

    def _send(self, stream: socket.socket, request: Request, response: Response) -> bool:
        if response.reset_after == -1:
            _reset(stream)
            return False
        if response.stall_after == -1:
            self._stopping.wait(60)
            return False
        wait = response.delay_seconds + (self._first_byte_seconds if request.method == "GET" else 0)
        if wait:
            time.sleep(wait)
        lines = [f"HTTP/1.1 {response.status} {REASONS.get(response.status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in response.headers.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        stream.sendall(head[: response.head_bytes])
        if response.head_bytes is not None:
            response.count = response.cut_after = 0
        if request.method == "HEAD":
            return request.headers.get("connection", "").lower() != "close"
        limits = [
            limit for limit in (response.cut_after, response.reset_after, response.stall_after) if limit is not None
        ]
        count = min([response.count, *limits])
        rate = response.bytes_per_second or self._bytes_per_second
        rates = [each for each in (rate, self._link and self._link.bytes_per_second) if each]
        for start, size in _portions(response.start, count, min(rates, default=None)):
            began = time.monotonic()
            if self._link:
                self._link.wait(size)
            self._send_range(stream, response.body, start, size)
            with self._lock:
                self.counters.body_bytes += size
            if rate:
                time.sleep(max(0.0, size / rate - (time.monotonic() - began)))
        stream.sendall(response.extra)
        if response.reset_after is not None:
            _reset(stream)
            return False
        if response.stall_after is not None:
            self._stopping.wait(60)
            return False
        return response.cut_after is None and request.headers.get("connection", "").lower() != "close"

    def _send_range(self, stream: socket.socket, body: bytes | Path, start: int, count: int) -> None:
        if isinstance(body, bytes):
            stream.sendall(memoryview(body)[start : start + count])
            return
        with body.open("rb", buffering=0) as file:
            if isinstance(stream, ssl.SSLSocket):
                file.seek(start)
                while count:
                    chunk = file.read(min(count, 1 << 18))
                    stream.sendall(chunk)
                    count -= len(chunk)
            while count:
                sent = os.sendfile(stream.fileno(), file.fileno(), start, count)
                start += sent
                count -= sent

    # -- the protocol --------------------------------------------------------------------------------

    def route(self, request: Request) -> Response:
        """Answer as a store in good health does."""
        if self._require_signature and not ("authorization" in request.headers or "X-Amz-Signature" in request.query):
            return error_response(403, "AccessDenied", "Access Denied")
        bucket = self.objects.get(request.bucket)
        if bucket is None:
            return error_response(404, "NoSuchBucket", "The specified bucket does not exist")
        if not request.key:
            return self._list(request, bucket)
        stored, kept = bucket.get(request.key), self.checksums.get((request.bucket, request.key))
        if self.is_versioned and "versionId" in request.query:
            version = request.query["versionId"][0]
            stored, kept = self._versions.get(version), self.version_checksums.get(version)
        if stored is None:
            return error_response(404, "NoSuchKey", "The specified key does not exist.")
        wanted = request.headers.get("if-match")
        if wanted is not None and wanted != stored.etag:
            return error_response(412, "PreconditionFailed", "At least one of the preconditions failed")
        if kept is not None and "attributes" in request.query:
            return attributes_response(request, kept, stored.etag, self.page_size)
        headers = {"ETag": stored.etag, "Accept-Ranges": "bytes", "x-amz-request-id": "TESTREQUEST"}
        if self.is_versioned:
            headers["x-amz-version-id"] = stored.version
        if kept is not None and request.headers.get("x-amz-checksum-mode") == "ENABLED":
            headers.update(kept.headers)
        headers["Last-Modified"] = "Thu, 01 Jan 2026 00:00:00 GMT"
        start, end = 0, stored.size
        given = request.headers.get("range")
        if given is None:
            headers["Content-Length"] = str(stored.size)
            return Response(200, headers, stored.content, 0, stored.size)
        first, _, last = given.removeprefix("bytes=").partition("-")
        start, end = int(first), min(stored.size, int(last) + 1 if last else stored.size)
        if start >= stored.size:
            return error_response(416, "InvalidRange", "The requested range is not satisfiable")
        headers["Content-Length"] = str(end - start)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{stored.size}"
        return Response(206, headers, stored.content, start, end - start)

    def _list(self, request: Request, bucket: dict[str, Stored]) -> Response:
        prefix = request.query.get("prefix", [""])[0]
        delimiter = request.query.get("delimiter", [""])[0]
        after = request.query.get("continuation-token", [""])[0]
        size = min(self.page_size, int(request.query.get("max-keys", ["1000"])[0]))
        entries: dict[str, Stored | None] = {}
        for key in sorted(bucket):
            if not key.startswith(prefix):
                continue
            folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            entries[prefix + folder + found if found else key] = None if found else bucket[key]
        keys = [key for key in entries if key > after]
        page, rest = keys[:size], keys[size:]
        parts = [f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount><EncodingType>url</EncodingType>"]
        for key in page:
            stored = entries[key]
            name = quote(key, safe="/")
            if stored is None:
                parts.append(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>")
            else:
                parts.append(
                    f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{escape(stored.etag)}</ETag><Size>{stored.size}</Size></Contents>"
                )
        if rest:
            parts.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        parts.append(f"<IsTruncated>{'true' if rest else 'false'}</IsTruncated>")
        body = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"{''.join(parts)}</ListBucketResult>"
        ).encode()
        headers = {"Content-Type": "application/xml", "Content-Length": str(len(body))}
        if self.bucket_region:
            headers["x-amz-bucket-region"] = self.bucket_region
        return Response(200, headers, body, 0, len(body))


def _portions(start: int, count: int, rate: float | None) -> Iterator[tuple[int, int]]:
    step = count if not rate else max(1, min(count, int(rate / 50)))
    while count > 0:
        size = min(step, count)
        yield start, size
        start += size
        count -= size


def _reset(stream: socket.socket) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve folders as buckets.")
    parser.add_argument("root", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-byte-seconds", type=float, default=0.0)
    parser.add_argument("--bytes-per-second", type=float, default=None)
    parser.add_argument("--link-bytes-per-second", type=float, default=None)
    parser.add_argument("--tls-certificate", type=Path, default=None)
    options = parser.parse_args()
    tls = None
    if options.tls_certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(options.tls_certificate)
    server = ObjectServer(
        options.root,
        port=options.port,
        first_byte_seconds=options.first_byte_seconds,
        bytes_per_second=options.bytes_per_second,
        link_bytes_per_second=options.link_bytes_per_second,
        tls=tls,
    )
    answer(server)


if __name__ == "__main__":
    main()
