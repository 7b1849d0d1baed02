"""Clients that read an object into flat memory, each set up once and then called."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.benchmarks.processes import emit, measure

__all__ = [
    "BUCKET",
    "CONCURRENCY",
    "RANGE_BYTES",
    "Client",
    "Read",
    "Store",
    "aiobotocore",
    "awscrt",
    "bare",
    "boto3",
    "flat_row",
    "obstore",
    "s3torchconnector",
]

RANGE_BYTES = 8 << 20
CONCURRENCY = 16
BUCKET, REGION = "bench", "us-east-1"


@dataclass(frozen=True)
class Store:
    """Where to read; `authority` is the PEM file of a private authority, for https."""

    endpoint: str
    authority: str | None = None

    @property
    def host(self) -> str:
        return urlsplit(self.endpoint).netloc


Read = Callable[[str, int, memoryview], None]
"""Reads the object of that key and size into memory."""
Client = Callable[[Store], Read]


def ranges(size: int) -> list[tuple[int, int]]:
    return [(start, min(size, start + RANGE_BYTES)) for start in range(0, size, RANGE_BYTES)]


def flat_row(arguments: dict[str, Any], client: Client) -> None:
    """Measure a client that reads the whole file into flat memory, and compare it with the file."""
    read = client(Store(arguments["endpoint"], arguments.get("authority")))
    file = Path(arguments["file"])
    small = (file.parent.parent / "small" / "model.safetensors").stat().st_size
    read("small/model.safetensors", small, _destination(small))
    size = file.stat().st_size
    target = _destination(size)

    def work() -> int:
        read("large/model.safetensors", size, target)
        return size

    sample = measure(work)
    with file.open("rb") as opened:
        for start in range(0, size, 64 << 20):
            assert opened.read(64 << 20) == target[start : start + (64 << 20)], f"wrong bytes after {start}"
    emit(sample)


def _destination(size: int) -> memoryview:
    buffer = (ctypes.c_char * size)()
    ctypes.memset(buffer, 1, size)
    return memoryview(buffer).cast("B")


def aiobotocore(store: Store) -> Read:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    async def read_all(key: str, size: int, target: memoryview) -> None:
        config = AioConfig(max_pool_connections=CONCURRENCY, signature_version="s3v4")
        async with get_session().create_client(
            "s3", endpoint_url=store.endpoint, config=config, verify=store.authority
        ) as client:
            gate = asyncio.Semaphore(CONCURRENCY)

            async def one(start: int, end: int) -> None:
                async with gate:
                    response = await client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={start}-{end - 1}")
                    async with response["Body"] as body:
                        target[start:end] = await body.read()

            await asyncio.gather(*(one(start, end) for start, end in ranges(size)))

    return lambda key, size, target: asyncio.run(read_all(key, size, target))


def bare(store: Store) -> Read:
    address = urlsplit(store.endpoint)
    host, port = str(address.hostname), address.port or 443
    tls = ssl.create_default_context(cafile=store.authority) if address.scheme == "https" else None

    async def read_all(key: str, size: int, target: memoryview) -> None:
        loop = asyncio.get_running_loop()
        parts = iter(ranges(size))

        async def work() -> None:
            _, protocol = await loop.create_connection(BareProtocol, host, port, ssl=tls)
            for start, end in parts:
                await protocol.get(f"/{BUCKET}/{key}", start, target[start:end])
            protocol.transport.close()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))

    return lambda key, size, target: asyncio.run(read_all(key, size, target))


class BareProtocol(asyncio.BufferedProtocol):
    """The least that receives a ranged GET into memory: no checks, no retries, no timeouts."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._scratch = memoryview(bytearray(16384))
        self._target: memoryview | None = None
        self._head = b""
        self._in_body = False

    async def get(self, path: str, start: int, target: memoryview) -> None:
        self._done = asyncio.get_running_loop().create_future()
        self._target, self._head, self._in_body = target, b"", False
        end = start + len(target) - 1
        self.transport.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nRange: bytes={start}-{end}\r\n\r\n".encode())
        await self._done

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target if self._in_body and self._target is not None else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        assert self._target is not None
        if self._in_body:
            self._target = self._target[nbytes:]
        else:
            self._head += bytes(self._scratch[:nbytes])
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            assert self._head.startswith(b"HTTP/1.1 206")
            rest = self._head[end + 4 :]
            self._target[: len(rest)] = rest
            self._target, self._in_body = self._target[len(rest) :], True
        if not len(self._target):
            self._in_body = False
            self._done.set_result(None)


def boto3(store: Store) -> Read:
    """Threads, each with its own range, whose body is read by ``readinto``, the leanest that boto3 offers."""
    import boto3 as package
    from botocore.config import Config

    config = Config(max_pool_connections=CONCURRENCY, signature_version="s3v4", s3={"addressing_style": "path"})
    client = package.client("s3", endpoint_url=store.endpoint, config=config, verify=store.authority)

    def one(key: str, target: memoryview, start: int, end: int) -> None:
        body = client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={start}-{end - 1}")["Body"]
        while start < end:
            received = body.readinto(target[start:end])
            assert received, "the body ended early"
            start += received

    return _in_threads(one)


def s3torchconnector(store: Store) -> Read:
    """Threads, each with its own range and a reader that does not buffer."""
    from s3torchconnector import S3ClientConfig, S3ReaderConstructor
    from s3torchconnector._s3client import S3Client

    config = S3ClientConfig(part_size=RANGE_BYTES, force_path_style=True)
    client = S3Client(REGION, endpoint=store.endpoint, s3client_config=config)

    made = S3ReaderConstructor.range_based(buffer_size=0)

    @functools.cache
    def size_of(key: str) -> Any:
        return client.head_object(BUCKET, key)  # else every reader would ask

    def one(key: str, target: memoryview, start: int, end: int) -> None:
        reader = client.get_object(BUCKET, key, object_info=size_of(key), reader_constructor=made)
        reader.seek(start)
        received = reader.readinto(target[start:end])
        assert received == end - start, "the body ended early"

    return _in_threads(one)


def _in_threads(one: Callable[[str, memoryview, int, int], None]) -> Read:
    pool = ThreadPoolExecutor(CONCURRENCY)

    def read(key: str, size: int, target: memoryview) -> None:
        asked: list[Future[None]] = [pool.submit(one, key, target, start, end) for start, end in ranges(size)]
        for future in asked:
            future.result()

    return read


def awscrt(store: Store) -> Read:
    """One request for the object, which the C client splits into parts; they are copied into place as they come."""
    from awscrt import auth, http, io, s3

    is_plain = urlsplit(store.endpoint).scheme == "http"
    tls = io.TlsContextOptions()
    if store.authority:
        tls.override_default_trust_store_from_path(None, store.authority)
    client = s3.S3Client(
        region=REGION,
        tls_mode=s3.S3RequestTlsMode.DISABLED if is_plain else s3.S3RequestTlsMode.ENABLED,
        tls_connection_options=None if is_plain else io.ClientTlsContext(tls).new_connection_options(),
        signing_config=s3.create_default_s3_signing_config(
            region=REGION, credential_provider=auth.AwsCredentialsProvider.new_static("bench", "bench")
        ),
        part_size=RANGE_BYTES,
        max_active_connections_override=CONCURRENCY,
    )

    def read(key: str, size: int, target: memoryview) -> None:
        ended = threading.Event()

        def on_body(chunk: bytes, offset: int, **_: Any) -> None:
            target[offset : offset + len(chunk)] = chunk

        def on_done(**_: Any) -> None:
            ended.set()

        headers = http.HttpHeaders([("host", store.host)])
        request = client.make_request(
            type=s3.S3RequestType.GET_OBJECT,
            request=http.HttpRequest("GET", f"/{BUCKET}/{key}", headers),
            on_body=on_body,
            on_done=on_done,
        )
        request.finished_future.result()
        ended.wait()

    return read


def obstore(store: Store) -> Read:
    """Its asyncio calls, whose results are copied into place."""
    import obstore as package
    from obstore.store import S3Store

    options: dict[str, Any] = {"allow_http": True}
    if store.authority:
        options["root_certificate"] = Path(store.authority).read_text()
    bucket = S3Store(
        BUCKET,
        endpoint=store.endpoint,
        region=REGION,
        access_key_id="bench",
        secret_access_key="bench",
        virtual_hosted_style_request=False,
        client_options=options,
    )

    async def read_all(key: str, size: int, target: memoryview) -> None:
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(start: int, end: int) -> None:
            async with gate:
                target[start:end] = memoryview(await package.get_range_async(bucket, key, start=start, end=end))

        await asyncio.gather(*(one(start, end) for start, end in ranges(size)))

    return lambda key, size, target: asyncio.run(read_all(key, size, target))
