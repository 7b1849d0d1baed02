"""A store that misbehaves: the bytes come out right, or one named error says what happened."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.config import StreamConfig
from streamer.errors import (
    AccessDeniedError,
    BadResponseError,
    CredentialsError,
    ObjectChangedError,
    SourceError,
    SourceUnavailableError,
)
from streamer.sources import ObjectInfo, open_source
from streamer.sources.s3 import S3Source
from streamer.sources.s3_url import parse_s3_url
from tests.conftest import SECRET_KEY
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response

BODY = bytes(range(256)) * 4000  # a megabyte
START, LENGTH = 1000, 900_000

Change = Callable[[Request, Response], Response | None]


def setting(**values: object) -> Change:
    def change(request: Request, response: Response) -> None:
        for name, value in values.items():
            setattr(response, name, value)

    return change


def header(name: str, value: str | None) -> Change:
    def change(request: Request, response: Response) -> None:
        if value is None:
            del response.headers[name]
        else:
            response.headers[name] = value

    return change


def whole_object(request: Request, response: Response) -> Response:
    headers = {"ETag": response.headers["ETag"], "Content-Length": str(len(BODY))}
    return Response(200, headers, response.body, 0, len(BODY))


def shorter(request: Request, response: Response) -> None:
    response.count //= 2
    response.headers["Content-Length"] = str(response.count)


def longer(request: Request, response: Response) -> None:
    response.count += 100  # the server sends more than it announced


def xml_in_200(request: Request, response: Response) -> Response:
    failed = error_response(503, "SlowDown")
    failed.status = 200
    return failed


def store_error(status: int, code: str, **headers: str) -> Change:
    return lambda request, response: error_response(status, code, "because", **headers)


def source_for(server: ObjectServer, transport: str, **options: object) -> S3Source:
    config = StreamConfig.resolve(
        {
            "endpoint_url": server.url,
            "transport": transport,
            "retry_first_wait_seconds": 0.01,
            "retry_longest_wait_seconds": 0.05,
            "retry_attempts": 4,
            "retry_deadline_seconds": 10.0,
            "idle_timeout_seconds": 0.5,
            **options,
        }
    )
    source = open_source("s3://bucket/m", config)
    assert isinstance(source, S3Source)
    return source


def fetch(server: ObjectServer, transport: str, **options: object) -> S3Source:
    """Read the range, in two segments, and compare it; return the source for its counters."""

    async def run() -> S3Source:
        source = source_for(server, transport, **options)
        buffers = [bytearray(100_000), bytearray(LENGTH - 100_000)]
        try:
            item = await source.stat("a.bin")
            await source.read_into(item, START, [memoryview(buffer) for buffer in buffers])
        finally:
            await source.close()
        assert b"".join(buffers) == BODY[START : START + LENGTH]
        return source

    return asyncio.run(run())


@pytest.fixture(params=["native", "sdk"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def stored(server: ObjectServer) -> None:
    server.put("bucket", "m/a.bin", BODY)


PASSING: dict[str, Change] = {
    "500": store_error(500, "InternalError"),
    "503 SlowDown": store_error(503, "SlowDown"),
    "429": store_error(429, "TooManyRequests", Retry_After="0"),
    "expired token": store_error(400, "ExpiredToken"),
    "reset before the head": setting(reset_after=-1),
    "reset at the first byte": setting(reset_after=0),
    "reset in the body": setting(reset_after=500_000),
    "closed before the last byte": setting(cut_after=LENGTH - 1),
    "stall before the head": setting(stall_after=-1),
    "stall in the body": setting(stall_after=100_000),
    "wrong start": header("Content-Range", f"bytes {START + 1}-{START + LENGTH}/{len(BODY)}"),
    "wrong end": header("Content-Range", f"bytes {START}-{START + LENGTH}/{len(BODY)}"),
    "wrong total": header("Content-Range", f"bytes {START}-{START + LENGTH - 1}/{len(BODY) + 1}"),
    "no Content-Range": header("Content-Range", None),
    "honest short body": shorter,
    "whole object": whole_object,
    "error document in a 200": xml_in_200,
    "false gzip": header("Content-Encoding", "gzip"),
    "other ETag": header("ETag", '"other"'),
}


@pytest.mark.parametrize("name", PASSING)
def test_one_fault_is_survived(server: ObjectServer, transport: str, name: str) -> None:
    server.faults = [Fault(PASSING[name])]
    source = fetch(server, transport)
    if (transport, name) != ("sdk", "reset before the head"):  # aiohttp repeats that one by itself
        assert source.stats.retries == 1
        assert source.stats.requests == 2


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("500", SourceUnavailableError, "status 500, InternalError, request id TESTREQUEST, 4 attempts"),
        ("503 SlowDown", SourceUnavailableError, "SlowDown.*lower the concurrency"),
        ("expired token", CredentialsError, "ExpiredToken.*log in again"),
        ("reset before the head", SourceUnavailableError, "4 attempts"),
        ("stall in the body", SourceUnavailableError, "4 attempts"),
        ("wrong start", BadResponseError, "covers bytes 1001-901000, not 1000-900999"),
        ("whole object", BadResponseError, "ignored the range"),
        ("honest short body", BadResponseError, "450000"),
        ("false gzip", BadResponseError, "gzip"),
        ("error document in a 200", BadResponseError, "ignored the range"),
        ("other ETag", BadResponseError, "ETag"),
    ],
)
def test_the_same_fault_for_ever_is_a_named_error(
    server: ObjectServer, transport: str, name: str, kind: type[SourceError], words: str
) -> None:
    server.faults = [Fault(PASSING[name], times=None)]
    began = time.monotonic()
    with pytest.raises(SourceError) as caught:
        fetch(server, transport)
    assert time.monotonic() - began < 12
    assert type(caught.value) is kind
    text = str(caught.value)
    assert re.search(r"s3://bucket/m/a\.bin bytes \d+-900999: ", text)
    assert re.search(words, text) or (transport == "sdk" and name == "honest short body"), text
    assert SECRET_KEY not in text
    assert "X-Amz-Signature" not in text


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (store_error(403, "AccessDenied"), AccessDeniedError, "access denied: because.*needs s3:GetObject"),
        (store_error(403, "InvalidAccessKeyId"), CredentialsError, "does not know this access key"),
        (store_error(403, "SignatureDoesNotMatch"), CredentialsError, "secret key"),
        (store_error(403, "RequestTimeTooSkewed"), CredentialsError, "clock"),
        (store_error(403, "InvalidObjectState"), AccessDeniedError, "archived"),
        (store_error(404, "NoSuchKey"), ObjectChangedError, "deleted during the load"),
        (store_error(412, "PreconditionFailed"), ObjectChangedError, "changed during the load"),
        (store_error(416, "InvalidRange"), ObjectChangedError, "now shorter"),
        (store_error(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), SourceError, "set region=eu-west-1"),
        (store_error(400, "InvalidRequest"), SourceError, "refused the request: because"),
    ],
)
def test_permanent_refusals_are_not_retried(
    server: ObjectServer, transport: str, change: Change, kind: type[SourceError], words: str
) -> None:
    server.faults = [Fault(change, times=None)]
    with pytest.raises(kind, match=words):
        fetch(server, transport)
    redirected = transport == "sdk" and "region" in words  # botocore follows a redirect once by itself
    assert server.counters.requests["GET"] == (2 if redirected else 1)


def test_replaced_between_two_reads(server: ObjectServer, transport: str) -> None:
    async def run() -> None:
        source = source_for(server, transport)
        item = await source.stat("a.bin")
        buffer = memoryview(bytearray(10))
        await source.read_into(item, 0, [buffer])
        server.put("bucket", "m/a.bin", BODY[::-1])  # same size, other bytes
        with pytest.raises(ObjectChangedError, match="changed during the load"):
            await source.read_into(item, 0, [buffer])
        await source.close()

    asyncio.run(run())


def test_every_drop_resumes_at_the_last_good_byte(server: ObjectServer) -> None:
    """The store drops each connection after 300 kB: more often than the attempts allow, but with progress."""
    server.faults = [Fault(setting(cut_after=300_000), times=2)]
    source = fetch(server, "native", retry_attempts=2)
    got = [start for _, start, _ in server.counters.ranges]
    assert got[0] == START
    assert got == sorted(got)
    assert source.stats.resumed_bytes >= 600_000
    assert server.counters.body_bytes - LENGTH < 50_000, "bytes were sent twice"


def test_a_byte_at_a_time_is_not_progress(server: ObjectServer) -> None:
    server.faults = [Fault(setting(cut_after=1), times=None)]
    with pytest.raises(SourceUnavailableError, match="3 attempts"):
        fetch(server, "native", retry_attempts=3)


def test_trickle_below_the_minimum_rate_is_a_stall(server: ObjectServer, transport: str) -> None:
    server.faults = [Fault(setting(bytes_per_second=20_000.0), times=None)]
    with pytest.raises(SourceUnavailableError, match="stalled: only .* bytes arrived in 0.5 s"):
        fetch(server, transport, min_rate_bytes_per_second=1 << 20, retry_attempts=2)


def test_slow_but_moving_is_not_a_stall(server: ObjectServer) -> None:
    """Nor are bytes that the kernel holds back until there are enough to wake us: 150 kB in a period here."""
    server.faults = [Fault(setting(bytes_per_second=300_000.0), times=None)]  # three seconds for the range
    assert fetch(server, "native", min_rate_bytes_per_second=100_000).stats.retries == 0


def test_more_bytes_than_announced_are_not_written(server: ObjectServer) -> None:
    server.faults = [Fault(longer)]
    source = fetch(server, "native")
    assert source.stats.retries == 0

    async def again() -> None:
        source = source_for(server, "native")
        item = await source.stat("a.bin")
        server.faults = [Fault(longer)]
        for _ in range(3):  # the poisoned connection is not used again
            buffer = bytearray(1000)
            await source.read_into(item, 0, [memoryview(buffer)])
            assert buffer == BODY[:1000]
        await source.close()

    asyncio.run(again())


def test_idle_connection_closed_by_the_server_costs_nothing(server: ObjectServer) -> None:
    async def run() -> None:
        source = source_for(server, "native", retry_attempts=1)
        item = await source.stat("a.bin")
        buffer = bytearray(1000)
        await source.read_into(item, 0, [memoryview(buffer)])
        # Closed by the server without our loop noticing before the next request is written.
        server.faults = [Fault(setting(reset_after=-1))]
        await source.read_into(item, 5, [memoryview(buffer)])
        assert buffer == BODY[5:1005]
        await source.close()

    asyncio.run(run())


def test_connections_are_kept_alive(server: ObjectServer) -> None:
    async def run() -> None:
        source = source_for(server, "native")
        item = await source.stat("a.bin")
        before = server.counters.connections
        for start in range(0, 50_000, 1000):
            buffer = bytearray(1000)
            await source.read_into(item, start, [memoryview(buffer)])
            assert buffer == BODY[start : start + 1000]
        assert server.counters.connections - before == 1
        await source.close()

    asyncio.run(run())


@pytest.mark.parametrize("use_uvloop", [False, True])
@pytest.mark.parametrize("when", ["head", "body"])
def test_a_cancelled_read_never_writes_again(server: ObjectServer, when: str, use_uvloop: bool) -> None:
    async def run() -> None:
        source = source_for(server, "native", idle_timeout_seconds=30.0)
        item = await source.stat("a.bin")
        server.faults = [Fault(setting(delay_seconds=0.3) if when == "head" else setting(bytes_per_second=5_000_000.0))]
        try:
            buffer = bytearray(LENGTH)
            task = asyncio.ensure_future(source.read_into(item, START, [memoryview(buffer)]))
            await asyncio.sleep(0.15)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            assert (buffer == bytes(LENGTH)) == (when == "head")
            buffer[:] = bytes(LENGTH)
            await asyncio.sleep(0.4)
            assert buffer == bytes(LENGTH)
            await source.read_into(item, START, [memoryview(buffer)])
            assert buffer == BODY[START : START + LENGTH]
        finally:
            await source.close()

    if use_uvloop:
        import uvloop

        uvloop.run(run())
    else:
        asyncio.run(run())


def test_signed_once_per_object_and_renewed_before_expiry(server: ObjectServer) -> None:
    server.put("bucket", "m/b.bin", BODY)
    now = 0.0
    signed: list[tuple[float, str]] = []

    async def run() -> None:
        nonlocal now
        config = StreamConfig(endpoint_url=server.url)
        source = S3Source(parse_s3_url("s3://bucket/m"), config, clock=lambda: now)
        first, second = await source.list()
        client = (await source._open()).api
        sign = client.generate_presigned_url

        async def counted(method: str, **options: Any) -> str:
            signed.append((now, options["Params"]["Key"]))
            assert options["ExpiresIn"] == 3600
            url: str = await sign(method, **options)
            return url

        client.generate_presigned_url = counted
        buffer = memoryview(bytearray(10))
        for now in (0.0, 100.0, 299.0, 301.0, 500.0, 602.0):  # noqa: B007
            await asyncio.gather(*(source.read_into(first, start, [buffer]) for start in range(20)))
        await source.read_into(second, 0, [buffer])
        await source.close()

    asyncio.run(run())
    assert [when for when, key in signed if key == "m/a.bin"][:1] == [0.0]
    assert {when for when, key in signed if key == "m/a.bin"} == {0.0, 301.0, 602.0}
    assert [when for when, key in signed if key == "m/b.bin"] == [602.0]


def test_expired_credentials_are_looked_up_anew(
    server: ObjectServer, transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The credentials file was rewritten while we were loading, and the store has stopped taking the old keys."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = x\n")

    def only_new(request: Request, response: Response) -> Response | None:
        signed = request.target + request.headers.get("authorization", "")
        return None if "AKIDNEW" in signed else error_response(400, "ExpiredToken")

    async def run() -> None:
        write("AKIDOLD")
        source = source_for(server, transport)
        item = await source.stat("a.bin")
        await source.read_into(item, 0, [memoryview(bytearray(10))])
        write("AKIDNEW")
        server.faults = [Fault(only_new, times=None)]
        buffer = bytearray(LENGTH)
        step = LENGTH // 9
        await asyncio.gather(
            *(
                source.read_into(item, START + start, [memoryview(buffer)[start : start + step]])
                for start in range(0, LENGTH, step)
            )
        )
        assert buffer == BODY[START : START + LENGTH]
        assert len(source._retired) == 1, "credentials are looked up once for all reads"
        await source.close()

    asyncio.run(run())


def test_requests_are_as_documented(server: ObjectServer) -> None:
    seen: list[dict[str, str]] = []
    server.faults = [Fault(lambda request, response: seen.append(request.headers), times=None)]
    fetch(server, "native")
    assert seen[0]["range"] == f"bytes={START}-{START + LENGTH - 1}"
    assert seen[0]["if-match"].startswith('"')
    assert seen[0]["accept-encoding"] == "identity"
    assert "authorization" not in seen[0]


def test_anonymous_sends_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with ObjectServer() as server:
        server.put("bucket", "m/a.bin", BODY)
        for transport in ("native", "sdk"):
            fetch(server, transport, anonymous=True)
        assert not any("X-Amz" in sent or "AWS4" in sent for sent in server.counters.authorization)


def test_anonymous_refusal_says_so(server: ObjectServer) -> None:
    with pytest.raises(AccessDeniedError, match="the request was anonymous"):
        fetch(server, "native", anonymous=True)


def test_no_credentials_suggests_what_to_do(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(CredentialsError, match="no credentials were found.*anonymous=true"):
        fetch(server, "native")


def test_refused_port_is_unavailable() -> None:
    async def run() -> None:
        with ObjectServer() as gone:
            pass
        source = source_for(gone, "native", retry_attempts=2)
        try:
            with pytest.raises(SourceUnavailableError, match="127.0.0.1.*2 attempts.*check the endpoint"):
                await source.list()
            with pytest.raises(SourceUnavailableError, match="cannot connect to http://127.0.0.1"):
                await source.read_into(ObjectInfo("a.bin", 100), 0, [memoryview(bytearray(10))])
        finally:
            await source.close()

    asyncio.run(run())


def test_region_of_the_bucket_is_followed_once(server: ObjectServer) -> None:
    server.bucket_region = "eu-central-1"

    async def run() -> None:
        source = source_for(server, "native")
        (item,) = await source.list()
        await source.read_into(item, 0, [memoryview(bytearray(10))])
        await source.close()

    asyncio.run(run())
    assert "us-east-1" in server.counters.authorization[0]
    assert "eu-central-1" in server.counters.authorization[-1]
