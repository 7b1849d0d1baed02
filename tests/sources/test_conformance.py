"""One suite that every source must pass; fixtures write around the source, so it cannot vouch for itself."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import fsspec
import pytest

from streamer.config import StreamConfig
from streamer.errors import ConfigError, CredentialsError, ObjectChangedError, ObjectNotFoundError, SourceError
from streamer.sources import ObjectInfo, Source, open_source
from streamer.sources.memory import MemorySource
from tests.conftest import SECRET_KEY
from tests.servers.fake_gcs import FakeGcs
from tests.servers.gcs import GcsServer
from tests.servers.object_server import ObjectServer
from tests.servers.s3_client import s3_client
from tests.servers.seaweed import SeaweedServer

T = TypeVar("T")

BODY = bytes(range(256)) * 400
ODD_KEYS = [
    "plain.bin",
    "with space.bin",
    "plus+sign.bin",
    "percent%20.bin",
    "percent%2Fslash.bin",
    "hash#mark.bin",
    "question?mark.bin",
    "amp&semi;colon=.bin",
    "unicode-é-模型.bin",
    "decomposed-e\u0301.bin",
    "a/b/c/deep.bin",
    "quote'double\".bin",
    "tilde~(paren).bin",
]


@dataclass
class Store:
    """A place that holds objects, and how to look at it through a source."""

    put: Callable[[Mapping[str, bytes]], None]
    """Write objects below the root, replacing those of equal key."""
    open: Callable[[], Source]


def s3_store(endpoint: str, transport: str, put: Callable[[str, str, bytes], None], bucket: str) -> Store:
    config = StreamConfig(endpoint_url=endpoint, transport=transport)  # type: ignore[arg-type]

    def put_all(objects: Mapping[str, bytes]) -> None:
        for key, body in objects.items():
            put(bucket, f"org/model/{key}", body)
        put(bucket, "org/model-v2/other.bin", b"a neighbour whose name begins the same")

    return Store(put_all, lambda: open_source(f"s3://{bucket}/org/model", config))


def gcs_store(endpoint: str, put: Callable[[str, str, bytes], None], bucket: str) -> Store:
    def put_all(objects: Mapping[str, bytes]) -> None:
        for key, body in objects.items():
            put(bucket, f"org/model/{key}", body)
        put(bucket, "org/model-v2/other.bin", b"a neighbour whose name begins the same")

    config = StreamConfig(endpoint_url=endpoint, anonymous=True)
    return Store(put_all, lambda: open_source(f"gs://{bucket}/org/model", config))


@pytest.fixture(
    params=[
        "memory",
        "local",
        "fsspec",
        "gcs-own",
        "gcs-fake",
        "own-native",
        "own-sdk",
        "moto-native",
        "moto-sdk",
        "seaweed-native",
        "seaweed-sdk",
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    kind, _, transport = str(request.param).partition("-")
    bucket = f"b-{uuid.uuid4().hex[:12]}"
    if kind == "memory":
        objects: dict[str, bytes] = {}
        yield Store(objects.update, lambda: MemorySource(objects))
    elif kind == "fsspec":

        def pipe(objects: Mapping[str, bytes]) -> None:
            files = {f"/{bucket}/org/model/{key}": body for key, body in objects.items()}
            fsspec.filesystem("memory").pipe({**files, f"/{bucket}/org/model-v2/other.bin": b"a neighbour"})

        yield Store(pipe, lambda: open_source(f"memory://{bucket}/org/model", StreamConfig()))
        if fsspec.filesystem("memory").exists(f"/{bucket}"):
            fsspec.filesystem("memory").rm(f"/{bucket}", recursive=True)
    elif kind == "local":

        def write(objects: Mapping[str, bytes]) -> None:
            for key, body in objects.items():
                path = tmp_path / "root" / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(body)

        yield Store(write, lambda: open_source(str(tmp_path / "root"), StreamConfig()))
    elif kind == "gcs":
        with contextlib.ExitStack() as stack:
            if transport == "own":
                gcs: GcsServer | FakeGcs = stack.enter_context(GcsServer())
                assert isinstance(gcs, GcsServer)
                gcs.objects[bucket] = {}
            else:
                gcs = request.getfixturevalue("fake_gcs")
                assert isinstance(gcs, FakeGcs)
                gcs.create_bucket(bucket)
            yield gcs_store(gcs.url, gcs.put, bucket)
    elif kind == "own":
        with ObjectServer(require_signature=True) as server:
            server.objects[bucket] = {}
            yield s3_store(server.url, transport, server.put, bucket)
    else:
        endpoint = request.getfixturevalue("moto_url") if kind == "moto" else request.getfixturevalue("seaweed").url
        client = s3_client(endpoint)
        client.create_bucket(Bucket=bucket)
        yield s3_store(endpoint, transport, lambda b, k, body: client.put_object(Bucket=b, Key=k, Body=body), bucket)
        client.close()


def use(store: Store, work: Callable[[Source], Awaitable[T]]) -> T:
    async def run() -> T:
        source = store.open()
        try:
            return await work(source)
        finally:
            await source.close()

    return asyncio.run(run())


async def read(source: Source, item: ObjectInfo, start: int, *lengths: int) -> list[bytes]:
    buffers = [bytearray(length) for length in lengths]
    await source.read_into(item, start, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers]


def test_lists_what_is_there_and_nothing_else(store: Store) -> None:
    store.put({"config.json": b"{}", "sub/folder/weights.bin": BODY})
    items = use(store, lambda source: source.list())
    assert {(item.key, item.size) for item in items} == {("config.json", 2), ("sub/folder/weights.bin", len(BODY))}
    assert all(item.pin for item in items)


def test_reads_any_range_into_any_segments(store: Store) -> None:
    store.put({"weights.bin": BODY})

    async def work(source: Source) -> None:
        (item,) = await source.list()
        assert await read(source, item, 0, len(BODY)) == [BODY]
        assert await read(source, item, 1000, 3, 50_000, 7) == [BODY[1000:1003], BODY[1003:51_003], BODY[51_003:51_010]]
        assert await read(source, item, len(BODY) - 1, 1) == [BODY[-1:]]
        many = await asyncio.gather(*(read(source, item, start, 997) for start in range(0, 90_000, 1500)))
        assert [part for (part,) in many] == [BODY[start : start + 997] for start in range(0, 90_000, 1500)]
        assert source.stats.bytes_received == len(BODY) + 50_010 + 1 + 60 * 997
        assert source.stats.retries == 0

    use(store, work)


def test_odd_keys(store: Store) -> None:
    bodies = {key: key.encode() * 3 for key in ODD_KEYS}
    store.put(bodies)

    async def work(source: Source) -> None:
        items = {item.key: item for item in await source.list()}
        assert set(items) == set(bodies)
        for key, body in bodies.items():
            assert await read(source, items[key], 0, len(body)) == [body]
            assert await source.stat(key) == items[key]

    use(store, work)


def test_stat(store: Store) -> None:
    store.put({"a.bin": BODY})

    async def work(source: Source) -> None:
        assert await source.stat("a.bin") == (await source.list())[0]
        with pytest.raises(ObjectNotFoundError) as caught:
            await source.stat("b.bin")
        assert isinstance(caught.value, FileNotFoundError)
        assert "b.bin" in str(caught.value)

    use(store, work)


def test_replaced_object_is_noticed(store: Store) -> None:
    store.put({"a.bin": BODY})

    async def work(source: Source) -> None:
        (item,) = await source.list()
        await asyncio.to_thread(store.put, {"a.bin": BODY[::-1]})
        with pytest.raises(ObjectChangedError, match="changed during the load|a.bin"):
            await read(source, item, 0, 100)

    use(store, work)


def test_empty_root_is_an_error_that_names_it(store: Store) -> None:
    async def work(source: Source) -> None:
        with pytest.raises(ObjectNotFoundError) as caught:
            await source.list()
        assert source.url.rstrip("/") in str(caught.value) or str(caught.value).startswith("/")

    use(store, work)


def test_close_is_idempotent_and_repr_is_harmless(store: Store) -> None:
    store.put({"a.bin": b"x"})

    async def work(source: Source) -> None:
        await source.list()
        await source.close()
        assert SECRET_KEY not in repr(source) + source.url + source.label("a.bin")

    use(store, work)


@pytest.fixture(params=["moto", "seaweed", "own"])
def endpoint(request: pytest.FixtureRequest) -> str:
    name = {"moto": "moto_url", "seaweed": "seaweed", "own": "server"}[str(request.param)]
    value = request.getfixturevalue(name)
    return value if isinstance(value, str) else str(value.url)


@pytest.fixture
def bucket(endpoint: str, request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[str, bytes], None]]]:
    name = f"b-{uuid.uuid4().hex[:12]}"
    if "own" in request.node.callspec.id:
        server: ObjectServer = request.getfixturevalue("server")
        server.objects[name] = {}
        yield name, lambda key, body: server.put(name, key, body)
        return
    client = s3_client(endpoint)
    client.create_bucket(Bucket=name)
    yield name, lambda key, body: client.put_object(Bucket=name, Key=key, Body=body) and None
    client.close()


def list_keys(url: str, endpoint: str) -> list[str]:
    config = StreamConfig(endpoint_url=endpoint)
    return sorted(item.key for item in use(Store(lambda _: None, lambda: open_source(url, config)), lambda s: s.list()))


def test_root_of_a_bucket_slashes_and_markers(endpoint: str, bucket: tuple[str, Callable[[str, bytes], None]]) -> None:
    name, put = bucket
    for key in ("top.bin", "m/a.bin", "m/n/b.bin", "m-v2/c.bin"):
        put(key, b"x")
    put("m/", b"")  # what consoles create for a folder
    assert list_keys(f"s3://{name}", endpoint) == list_keys(f"s3://{name}/", endpoint)
    assert list_keys(f"s3://{name}", endpoint) == ["m-v2/c.bin", "m/a.bin", "m/n/b.bin", "top.bin"]
    assert list_keys(f"s3://{name}/m", endpoint) == list_keys(f"s3://{name}/m/", endpoint) == ["a.bin", "n/b.bin"]


def test_more_than_a_thousand_keys(endpoint: str, bucket: tuple[str, Callable[[str, bytes], None]]) -> None:
    name, put = bucket
    keys = [f"m/{number:05d}.bin" for number in range(1001)]
    for key in keys:
        put(key, b"x")
    assert list_keys(f"s3://{name}/m", endpoint) == [key.removeprefix("m/") for key in keys]


def test_empty_prefix_suggests_neighbours(endpoint: str, bucket: tuple[str, Callable[[str, bytes], None]]) -> None:
    name, put = bucket
    put("model-v2/a.bin", b"x")
    with pytest.raises(ObjectNotFoundError, match=rf"s3://{name}/model/: .*there is s3://{name}/model-v2/"):
        list_keys(f"s3://{name}/model", endpoint)


def test_missing_bucket(endpoint: str) -> None:
    with pytest.raises(ObjectNotFoundError, match="no such bucket"):
        list_keys("s3://there-is-no-such-bucket/m", endpoint)


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_wrong_secret_fails(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    client = s3_client(seaweed.url)
    name = f"b-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    client.put_object(Bucket=name, Key="m/a.bin", Body=BODY)
    client.close()
    config = StreamConfig(endpoint_url=seaweed.url, transport=transport)  # type: ignore[arg-type]

    async def work(source: Source) -> None:
        with pytest.raises(CredentialsError, match="SignatureDoesNotMatch"):
            await source.list()
        with pytest.raises(SourceError, match=r"a\.bin bytes 0-9: .*(SignatureDoesNotMatch|access denied)"):
            await read(source, ObjectInfo("a.bin", len(BODY)), 0, 10)

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONGSECRET")
    use(Store(lambda _: None, lambda: open_source(f"s3://{name}/m", config)), work)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "names no bucket"),
        ("s3:///m", "names no bucket"),
        ("nosuch://host/x", "fsspec has no filesystem for this URL"),
        ("file://host/x", "names the host"),
        ("", "the URL is empty"),
    ],
)
def test_bad_urls(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_source(url, StreamConfig())
