"""Google Cloud Storage: its listing, its refusals, its generations, and answers that are not what was asked for."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import awscrt.checksums
import pytest

from streamer.config import StreamConfig
from streamer.errors import (
    AccessDeniedError,
    BadResponseError,
    ConfigError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
    SourceUnavailableError,
)
from streamer.sources import ObjectInfo, Source, open_source
from streamer.sources.gcs import GcsSource
from tests.certificates import Certificates
from tests.servers.fake_gcs import FakeGcs
from tests.servers.faults import BY_NAME, NamedFault, Where
from tests.servers.gcs import GcsServer, gcs_error
from tests.servers.messages import Fault, Request, Response
from tests.servers.proxy import Proxy

BODY = bytes(range(256)) * 3000
QUICK = {
    "anonymous": True,
    "retry_attempts": 3,
    "retry_first_wait_seconds": 0.001,
    "idle_timeout_seconds": 0.3,
    "min_rate_bytes_per_second": 100_000,
}


@pytest.fixture
def gcs() -> Iterator[GcsServer]:
    with GcsServer() as server:
        server.put("bucket", "m/a.bin", BODY)
        yield server


def use(server: GcsServer | FakeGcs, work: Callable[[Source], Awaitable[Any]], url: str = "", **options: object) -> Any:
    async def run() -> Any:
        config = StreamConfig.resolve({"endpoint_url": server.url, **QUICK, **options})
        source = open_source(url or "gs://bucket/m", config)
        try:
            return await work(source)
        finally:
            await source.close()

    return asyncio.run(run())


async def read(source: Source, item: ObjectInfo, start: int = 0, end: int | None = None) -> bytes:
    buffer = bytearray((item.size if end is None else end) - start)
    await source.read_into(item, start, [memoryview(buffer)])
    return bytes(buffer)


async def read_first(source: Source) -> bytes:
    return await read(source, (await source.list())[0])


async def keys(source: Source) -> list[str]:
    return [item.key for item in await source.list()]


# -- listing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["own", "fake"])
def test_root_of_a_bucket_slashes_and_markers(kind: str, fake_gcs: FakeGcs) -> None:
    with GcsServer() as own:
        server: Any = own if kind == "own" else fake_gcs
        bucket = f"markers-{kind}"
        if kind == "fake":
            fake_gcs.create_bucket(bucket)
        for key in ("m-v2/c.bin", "m/", "m/a.bin", "m/n/b.bin", "top.bin"):
            server.put(bucket, key, b"x" if not key.endswith("/") else b"")
        everything = ["m-v2/c.bin", "m/a.bin", "m/n/b.bin", "top.bin"]
        assert use(server, keys, f"gs://{bucket}") == use(server, keys, f"gs://{bucket}/") == everything
        assert use(server, keys, f"gs://{bucket}/m") == use(server, keys, f"gs://{bucket}/m/") == ["a.bin", "n/b.bin"]
        with pytest.raises(ObjectNotFoundError, match=rf"gs://{bucket}/m-v/: .*there is gs://{bucket}/m-v2/"):
            use(server, keys, f"gs://{bucket}/m-v")
        with pytest.raises(ObjectNotFoundError, match=r"gs://nowhere-at-all/m/: not found"):
            use(server, keys, "gs://nowhere-at-all/m")


def test_many_pages(gcs: GcsServer) -> None:
    gcs.page_size = 7
    names = [f"{number:03d}.bin" for number in range(50)]
    for name in names:
        gcs.put("many", f"m/{name}", b"x")
    assert use(gcs, keys, "gs://many/m") == names
    assert gcs.counters.requests["LIST"] == 8


def test_pages_without_items_are_followed(gcs: GcsServer) -> None:
    """As of buckets with a hierarchical namespace, whose folders are on pages of their own."""

    def only_folders(request: Request, response: Response) -> Response:
        page = gcs_error(200, "", "")
        page.body = b'{"kind":"storage#objects","prefixes":["m/sub/"],"nextPageToken":"l"}'
        page.count = len(page.body)
        page.headers["Content-Length"] = str(page.count)
        return page

    gcs.faults.append(Fault(only_folders, times=1, method="LIST"))
    assert use(gcs, keys) == ["a.bin"]
    gcs.faults.append(Fault(only_folders, times=None, method="LIST"))
    with pytest.raises(BadResponseError, match="the listing has no end"):
        use(gcs, keys)


def test_an_empty_folder_is_no_model(gcs: GcsServer) -> None:
    gcs.put("bucket", "empty/", b"")
    with pytest.raises(ObjectNotFoundError, match=r"gs://bucket/empty/: there are no objects here"):
        use(gcs, keys, "gs://bucket/empty")


@pytest.mark.parametrize(
    "body", [b"<html>captive portal</html>", b"[]", b'{"items":[3]}', b'{"items":[{"name":"m/x"}]}']
)
def test_something_else_than_a_listing(gcs: GcsServer, body: bytes) -> None:
    def other(request: Request, response: Response) -> None:
        response.body, response.count = body, len(body)
        response.headers["Content-Length"] = str(len(body))

    gcs.faults.append(Fault(other, times=None, method="LIST"))
    with pytest.raises(BadResponseError, match="JSON API|no size and generation"):
        use(gcs, keys)


# -- refusals ------------------------------------------------------------------------------------------------


def refusing(status: int, reason: str, message: str) -> Callable[[Request, Response], Response]:
    return lambda request, response: gcs_error(status, reason, message)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (429, "rateLimitExceeded"),
        (403, "rateLimitExceeded"),
        (403, "userRateLimitExceeded"),
        (500, "internalError"),
        (502, "badGateway"),
        (503, "backendError"),
        (504, "gatewayTimeout"),
        (408, "uploadBrokenConnection"),
    ],
)
@pytest.mark.parametrize("method", ["LIST", "GET", "STAT"])
def test_what_passes_is_waited_out(gcs: GcsServer, status: int, reason: str, method: str) -> None:
    async def work(source: Source) -> tuple[int, int]:
        await source.stat("a.bin")
        assert await read_first(source) == BODY
        return source.stats.retries, source.stats.throttled

    gcs.faults.append(Fault(refusing(status, reason, "because"), times=2, method=method))
    retries, throttled = use(gcs, work)
    assert retries == (2 if method == "GET" else 0)
    assert throttled == (2 if method == "GET" and (reason.endswith("LimitExceeded") or status == 503) else 0)
    gcs.faults[:] = [Fault(refusing(status, reason, "because"), times=None, method=method)]
    with pytest.raises(SourceUnavailableError, match=rf"status {status}, {reason}, request id TESTUPLOAD, 3 attempts"):
        use(gcs, work)


@pytest.mark.parametrize(
    ("status", "reason", "kind", "words"),
    [
        (403, "forbidden", AccessDeniedError, "storage.objects.get|anonymous"),
        (403, "dailyLimitExceeded", AccessDeniedError, "denied"),
        (401, "required", AccessDeniedError, "the request was anonymous"),
        (404, "notFound", ObjectChangedError, "replaced or deleted during the load"),
        (412, "conditionNotMet", ObjectChangedError, "changed during the load"),
        (416, "requestedRangeNotSatisfiable", ObjectChangedError, "shorter"),
        (400, "invalid", SourceError, "refused the request"),
        (302, "", SourceError, "another endpoint"),
    ],
)
def test_what_is_final_is_not_tried_again(
    gcs: GcsServer, status: int, reason: str, kind: type[SourceError], words: str
) -> None:
    gcs.faults.append(Fault(refusing(status, reason, "because of ya29.SECRET-token"), times=None))
    with pytest.raises(kind, match=words) as caught:
        use(gcs, read_first)
    assert gcs.counters.requests["GET"] == 1
    assert "gs://bucket/m/a.bin bytes 0-" in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_refusals_in_plain_text_are_quoted(gcs: GcsServer) -> None:
    def plain(request: Request, response: Response) -> Response:
        refusal = gcs_error(403, "", "")
        refusal.body = b"me@project does not have storage.objects.get access to the\n object."
        refusal.count = len(refusal.body)
        refusal.headers["Content-Length"] = str(refusal.count)
        return refusal

    gcs.faults.append(Fault(plain))
    with pytest.raises(
        AccessDeniedError, match=r"denied: me@project does not have storage.objects.get access to the o"
    ):
        use(gcs, read_first)


def test_requester_pays(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    gcs.payer = "who-pays"
    with pytest.raises(SourceError, match="requester_pays=true.*GOOGLE_CLOUD_PROJECT"):
        use(gcs, read_first)
    with pytest.raises(ConfigError, match="set GOOGLE_CLOUD_PROJECT"):
        use(gcs, read_first, requester_pays=True)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "who-pays")
    assert use(gcs, read_first, requester_pays=True) == BODY


# -- identity of content -------------------------------------------------------------------------------------


def test_reads_name_the_generation(gcs: GcsServer) -> None:
    async def work(source: Source) -> None:
        item = (await source.list())[0]
        assert (item.pin, item.version) == (gcs.generation("bucket", "m/a.bin"), None)
        assert item == await source.stat("a.bin")
        assert await read(source, item, 100, 200) == BODY[100:200]
        gcs.put("bucket", "m/a.bin", BODY[::-1])
        with pytest.raises(ObjectChangedError, match=r"a\.bin bytes 0-99: the object was replaced or deleted"):
            await read(source, item, 0, 100)

    seen: list[dict[str, list[str]]] = []
    gcs.faults.append(Fault(lambda request, response: seen.append(request.query), times=None))
    generation = gcs.generation("bucket", "m/a.bin")
    use(gcs, work)
    assert all(query["generation"] == query["ifGenerationMatch"] == [generation] for query in seen)
    assert len(seen) == 2


def test_a_generation_that_is_kept_is_read_on(gcs: GcsServer) -> None:
    async def work(source: Source) -> None:
        item = (await source.list())[0]
        assert item.version == item.pin
        gcs.put("bucket", "m/a.bin", BODY[::-1])
        assert await read(source, item) == BODY
        assert await source.stat("a.bin", item.version) == item
        assert await source.stat("a.bin") != item

    gcs.is_versioned = True
    use(gcs, work, pin="version")


def test_another_generation_than_was_asked_for(gcs: GcsServer) -> None:
    """From a server that honours neither parameter, as emulators do."""

    async def work(source: Source) -> None:
        item = (await source.list())[0]
        gcs.put("bucket", "m/a.bin", BODY[::-1])
        with pytest.raises(BadResponseError, match="x-goog-generation is .*, not "):
            await read(source, item, 0, 100)

    gcs.honours_generations = False
    use(gcs, work)


@pytest.mark.parametrize("kind", ["own", "fake"])
def test_encoded_objects_are_refused_by_name(kind: str, gcs: GcsServer, fake_gcs: FakeGcs) -> None:
    body = gzip.compress(b"{}" * 1000)
    server: Any = gcs
    bucket = f"encoded-{kind}"
    if kind == "fake":
        server = fake_gcs
        fake_gcs.create_bucket(bucket)
        fake_gcs.put(bucket, "m/config.json", body, contentEncoding="gzip")
    else:
        gcs.encodings[bucket, "m/config.json"] = "gzip"
        gcs.put(bucket, "m/config.json", body)
    server.put(bucket, "m/plain.json", b"{}")

    async def work(source: Source) -> None:
        encoded, plain = await source.list()
        assert await read(source, plain) == b"{}"
        assert encoded.size == len(body)
        with pytest.raises(SourceError, match=r"config\.json: it is stored with Content-Encoding: gzip"):
            await read(source, encoded)

    use(server, work, f"gs://{bucket}/m")

    async def as_listed_by_another_rank(source: Source) -> None:
        item = ObjectInfo("config.json", len(body), await use_pin(source))
        with pytest.raises(SourceError, match="encoded .gzip"):
            await read(source, item, 0, 10)

    async def use_pin(source: Source) -> str | None:
        other = open_source(source.url, StreamConfig(endpoint_url=server.url, anonymous=True))
        try:
            return (await other.stat("config.json")).pin
        finally:
            await other.close()

    use(server, as_listed_by_another_rank, f"gs://{bucket}/m")


def test_stored_bytes_are_asked_for(gcs: GcsServer) -> None:
    use(gcs, read_first)
    assert gcs.accepted_encodings == ["gzip"]


def test_the_checksum_that_gcs_keeps(gcs: GcsServer) -> None:
    async def work(source: Source) -> None:
        assert isinstance(source, GcsSource)
        item = (await source.list())[0]
        stored = await source.stored_checksum(item)
        assert stored.algorithm == "CRC32C"
        assert [(part.start, part.end) for part in stored.parts] == [(0, len(BODY))]
        assert stored.parts[0].digest == awscrt.checksums.crc32c(BODY).to_bytes(4, "big")
        gcs.put("bucket", "m/a.bin", BODY[::-1])
        with pytest.raises(ObjectChangedError):
            await source.stored_checksum(item)

    use(gcs, work)


# -- answers that are not what was asked for -----------------------------------------------------------------

_OF_S3 = (
    "expired",
    "400 without",
    "redirect",
    "error document in a 200",
    "ETag",
    "403",
    "404",
    "replaced",
    "shortened",
)
FAULTS = [
    fault
    for fault in BY_NAME.values()
    if not any(word in fault.name for word in _OF_S3)
    and fault.name not in ("certificate not trusted", "no accept for ever", "connection refused for ever")
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_of_bodies(gcs: GcsServer, fault: NamedFault) -> None:
    """The same catalogue as for S3: the shapes of answers, not S3's documents."""
    gcs.put("bucket", "m/b.bin", BODY)

    async def work(source: Source) -> None:
        items = await source.list()
        fault.install(gcs, Where("GET", "m/a.bin", end=500_000))
        wanted = BODY[100_000:500_000]
        if fault.is_survivable:
            assert await read(source, items[0], 100_000, 500_000) == wanted
            assert source.stats.retries >= fault.retries
        else:
            with pytest.raises(fault.ends_in):
                await read(source, items[0], 100_000, 500_000)
        gcs.faults.clear()
        assert await read(source, items[1], 1000, 2000) == BODY[1000:2000]

    use(gcs, work, "gs://bucket/m", **{"hedge": False, "connect_timeout_seconds": 2, **fault.options})


# -- network -------------------------------------------------------------------------------------------------


def test_tls_with_a_private_authority(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server)
    with GcsServer(tls=context) as server:
        server.put("bucket", "m/a.bin", BODY)
        assert use(server, read_first, ca_bundle=str(certificates.authority)) == BODY
        with pytest.raises(SourceError, match="certificate.*not trusted.*ca_bundle"):
            use(server, read_first)
        for variable in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
            monkeypatch.setenv(variable, str(certificates.authority))
            assert use(server, read_first) == BODY
            monkeypatch.delenv(variable)
        with Proxy("user:secret") as proxy:
            monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@127.0.0.1:{proxy.port}")
            assert use(server, read_first, ca_bundle=str(certificates.authority)) == BODY
            assert {line.split(" ")[0] for line in proxy.seen} == {"CONNECT"}
            assert len(proxy.seen) == 2  # one of the listing, one of bodies


def test_proxies(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy("user:hunter2") as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://user:hunter2@127.0.0.1:{proxy.port}")
        assert use(gcs, read_first) == BODY
        assert len(proxy.seen) == 2
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert use(gcs, read_first) == BODY
        assert len(proxy.seen) == 2
    monkeypatch.delenv("NO_PROXY")
    with pytest.raises(SourceUnavailableError, match=r"through the proxy 127\.0\.0\.1") as caught:
        use(gcs, read_first)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    monkeypatch.setenv("HTTP_PROXY", "socks5://user:hunter2@127.0.0.1:1080")
    with pytest.raises(ConfigError, match="needs socks5") as refused:
        use(gcs, read_first)
    assert "hunter2" not in str(refused.value)


# -- URLs and options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_scheme", [True, False])
def test_the_emulator_is_asked_anonymously(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch, with_scheme: bool) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url if with_scheme else gcs.url.removeprefix("http://"))
    assert use(gcs, read_first, endpoint_url=None, anonymous=False) == BODY
    assert not any("Bearer" in sent for sent in gcs.counters.authorization)


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("gs://", {}, "names no bucket"),
        ("gs:///m", {}, "names no bucket"),
        ("gs://user:pw@bucket/m", {}, "no place for credentials"),
        ("gs://bucket/m", {"transport": "sdk"}, "transport=sdk"),
        ("gs://bucket/m", {"sse_customer_key_file": "/key"}, "only sent to S3"),
        ("gs://bucket/m", {"endpoint_url": "storage.local"}, "no URL of a server"),
        ("gs://bucket/m", {"endpoint_url": "http://host:port"}, "no URL of a server"),
        ("gs://bucket/m", {"endpoint_url": "http://me:pw@host"}, "has a user name"),
        ("gs://bucket/m", {"endpoint_url": "http://storage.example"}, "tokens are not sent .* unencrypted"),
        ("gs://bucket/m", {"ca_bundle": "/nowhere.pem"}, "nowhere.pem does not exist"),
    ],
)
def test_what_cannot_be_used(url: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        open_source(url, StreamConfig(**options))  # type: ignore[arg-type]
    assert "pw" not in str(caught.value)
