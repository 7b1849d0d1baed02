"""``pin=version``: what is replaced or deleted during a load is read on as it was, on every rank."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamer.artifacts.metadata import PINS_FILE, pull, read_pins
from streamer.checkpoint.manifest import MANIFEST_KEY, parse_manifest
from streamer.cli.app import app
from streamer.config import StreamConfig
from streamer.errors import AccessDeniedError, ConfigError, ObjectChangedError
from streamer.fetch.headers import read_checkpoint
from streamer.sources import ObjectInfo, open_source
from streamer.sources.pinned import PinnedSource
from tests.faults.loading import OBJECTS, OPTIONS, load_once
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.servers.s3_client import s3_client

OLD, NEW = b"old bytes " * 500, b"new bytes " * 500
SCRAMBLE = bytes(255 - value for value in range(256))


@pytest.fixture(params=["native", "sdk"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Bucket:
    """A bucket of moto's, with versioning."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.name = f"b-{uuid.uuid4().hex[:12]}"
        self.client = s3_client(endpoint)
        self.client.create_bucket(Bucket=self.name)
        self.versioning("Enabled")

    def versioning(self, status: str) -> None:
        self.client.put_bucket_versioning(Bucket=self.name, VersioningConfiguration={"Status": status})

    def put(self, key: str, body: bytes) -> str:
        return str(self.client.put_object(Bucket=self.name, Key=f"m/{key}", Body=body).get("VersionId"))

    def delete(self, key: str, **version: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=f"m/{key}", **version)

    @property
    def url(self) -> str:
        return f"s3://{self.name}/m"

    def config(self, **options: Any) -> StreamConfig:
        return StreamConfig.resolve({"endpoint_url": self.endpoint, **options})


@pytest.fixture
def bucket(moto_url: str) -> Bucket:
    return Bucket(moto_url)


async def _read(source: Any, item: ObjectInfo, start: int = 0) -> bytes:
    body = bytearray(item.size - start)
    await source.read_into(item, start, [memoryview(body)])
    return bytes(body)


@pytest.mark.parametrize("deleted", [False, True])
def test_what_is_replaced_or_deleted_is_read_as_it_was(bucket: Bucket, transport: str, deleted: bool) -> None:
    version = bucket.put("a.bin", OLD)

    async def run() -> None:
        source = open_source(bucket.url, bucket.config(transport=transport, pin="version"))
        (item,) = await source.list()
        assert (item.version, item.size) == (version, len(OLD))
        assert await source.stat("a.bin") == item
        assert await _read(source, item, start=7) == OLD[7:]
        if deleted:
            bucket.delete("a.bin")
        else:
            bucket.put("a.bin", NEW)
        assert await _read(source, item, start=7) == OLD[7:]
        assert await source.stat("a.bin", version) == item
        if not deleted:
            now = await source.stat("a.bin")
            assert now.version != version
            assert await _read(source, now) == NEW  # of the same key, and not from the first one's address
        await source.close()

    asyncio.run(run())


@pytest.mark.parametrize(("deleted", "words"), [(False, "changed during the load"), (True, "was deleted during the")])
def test_under_etags_both_stop_the_load(bucket: Bucket, transport: str, deleted: bool, words: str) -> None:
    bucket.put("a.bin", OLD)

    async def run() -> None:
        source = open_source(bucket.url, bucket.config(transport=transport))
        (item,) = await source.list()
        assert item.version is None
        if deleted:
            bucket.delete("a.bin")
        else:
            bucket.put("a.bin", NEW)
        with pytest.raises(ObjectChangedError, match=words):
            await _read(source, item)
        pinned = PinnedSource(source, [item])
        with pytest.raises(ObjectChangedError, match=f"{'deleted' if deleted else 'replaced'} since the model was"):
            await pinned.list()
        await source.close()

    asyncio.run(run())


def test_a_version_that_was_deleted_for_good_is_named(bucket: Bucket, transport: str) -> None:
    version = bucket.put("a.bin", OLD)

    async def run() -> None:
        source = open_source(bucket.url, bucket.config(transport=transport, pin="version"))
        (item,) = await source.list()
        bucket.put("a.bin", NEW)
        bucket.delete("a.bin", VersionId=version)
        with pytest.raises(ObjectChangedError, match=f"version {version} of the object was deleted during the load"):
            await _read(source, item)
        with pytest.raises(ObjectChangedError, match="deleted since the model was resolved"):
            await PinnedSource(source, [item]).list()
        await source.close()

    asyncio.run(run())


async def refuses_to_list(endpoint: str, url: str) -> None:
    source = open_source(url, StreamConfig(endpoint_url=endpoint, pin="version"))
    try:
        with pytest.raises(ConfigError, match=r"m/a\.bin has no version to pin.*turn on the bucket's versioning"):
            await source.list()
    finally:
        await source.close()


def test_without_versions_the_option_is_refused(moto_url: str) -> None:
    client, name = s3_client(moto_url), f"b-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    client.put_object(Bucket=name, Key="m/a.bin", Body=OLD)
    asyncio.run(refuses_to_list(moto_url, f"s3://{name}/m"))


def test_the_version_that_the_next_upload_replaces_is_none(server: ObjectServer) -> None:
    """What S3 calls the objects of a bucket whose versioning is suspended, or was turned on later."""
    server.put("bucket", "m/a.bin", OLD)
    versioned(server, version="null")
    asyncio.run(refuses_to_list(server.url, "s3://bucket/m"))


def test_only_s3_has_versions() -> None:
    with pytest.raises(ConfigError, match="pin=version.*only s3://"):
        open_source("memory://bucket/m", StreamConfig(pin="version"))


def test_rank_1_loads_what_was_pulled(bucket: Bucket, transport: str, tmp_path: Path) -> None:
    """One process pulls; everything is replaced; the ranks then go by the file of pins."""
    versions = {key: bucket.put(key, body) for key, body in OBJECTS.items()}
    config = bucket.config(transport=transport, pin="version", cache_dir=str(tmp_path))
    pulled = pull(bucket.url, config)
    assert {item.key: item.version for item in pulled.items} == versions
    for key, body in OBJECTS.items():
        bucket.put(key, body.translate(SCRAMBLE))
    again = read_pins(pulled.folder)
    assert again == pulled
    for rank in (1, 0):
        for mode in ("trace", "eager"):
            outcome = load_once(
                bucket.endpoint,
                mode,
                {"pin": "version", "transport": transport},
                rank=rank,
                size=2,
                url=bucket.url,
                items=again.items,
            )
            assert outcome.is_exact, outcome
    assert pull(bucket.url, config).folder != pulled.folder


def test_pins_of_an_older_form_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / PINS_FILE).write_text(json.dumps({"format": 1, "url": bucket.url, "objects": [["a", 1, '"x"']]}))
    with pytest.raises(ConfigError, match="not written by this version"):
        read_pins(tmp_path)


def test_ranks_that_were_told_differently_do_not_fall_back(bucket: Bucket, transport: str) -> None:
    bucket.put("a.bin", OLD)

    async def run() -> None:
        lister = open_source(bucket.url, bucket.config())
        (item,) = await lister.list()
        await lister.close()
        source = open_source(bucket.url, bucket.config(transport=transport, pin="version"))
        with pytest.raises(ConfigError, match="without its version.*every process"):
            await _read(source, item)
        await source.close()

    asyncio.run(run())


def test_the_manifest_says_which_versions_it_was_made_of(bucket: Bucket) -> None:
    versions = {key: bucket.put(key, body) for key, body in OBJECTS.items()}
    options = [f"--option={name}={value}" for name, value in OPTIONS.items()]
    options += [f"--option=endpoint_url={bucket.endpoint}", "--option=pin=version"]
    done = CliRunner().invoke(app, ["verify", bucket.url, "--write", "--quiet", *options])
    assert done.exit_code == 0, done.output
    body = bucket.client.get_object(Bucket=bucket.name, Key=f"m/{MANIFEST_KEY}")["Body"].read()
    files = parse_manifest(body, "it").files
    assert {key: file.version for key, file in files.items()} == {key: versions[key] for key in files}
    assert {key: file["version"] for key, file in json.loads(body)["files"].items()} == {
        key: versions[key] for key in files
    }
    assert len(files) == 2
    without = json.loads(body)
    for file in without["files"].values():
        del file["version"]
    assert all(file.version is None for file in parse_manifest(json.dumps(without).encode(), "it").files.values())


def versioned(server: ObjectServer, *, version: str = "version-1", delay_seconds: float = 0.0) -> None:
    """Have HEADs name a version."""

    def change(request: Request, response: Response) -> None:
        response.headers["x-amz-version-id"] = version
        response.delay_seconds = delay_seconds

    server.faults.append(Fault(change, times=None, method="HEAD"))


def test_versions_are_looked_up_side_by_side(server: ObjectServer) -> None:
    for number in range(8):
        server.put("bucket", f"m/{number}.bin", OLD)
    versioned(server, delay_seconds=0.2)

    async def run() -> None:
        source = open_source("s3://bucket/m", StreamConfig(endpoint_url=server.url, pin="version", concurrency=4))
        assert [item.version for item in await source.list()] == ["version-1"] * 8
        await source.close()

    asyncio.run(run())
    assert server.counters.requests["HEAD"] == 8
    assert server.counters.most_open_connections == 4


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_what_changes_between_listing_and_look_up_is_refused(server: ObjectServer, how: str) -> None:
    server.put("bucket", "m/a.bin", OLD)

    def change(request: Request, response: Response) -> Response:
        if how == "deleted":
            del server.objects["bucket"]["m/a.bin"]
        else:
            server.put("bucket", "m/a.bin", NEW)
        answer = server.route(request)
        answer.headers["x-amz-version-id"] = "version-2"
        return answer

    server.faults = [Fault(change, method="HEAD")]

    async def run() -> None:
        source = open_source("s3://bucket/m", StreamConfig(endpoint_url=server.url, pin="version"))
        with pytest.raises(ObjectChangedError, match=rf"m/a\.bin: the object was {how} while the model was resolved"):
            await source.list()
        await source.close()

    asyncio.run(run())


def test_the_permission_for_versions_is_named(server: ObjectServer, transport: str) -> None:
    server.put("bucket", "m/a.bin", OLD)
    versioned(server)

    def deny(request: Request, response: Response) -> Response | None:
        return error_response(403, "AccessDenied", "no") if request.query.get("versionId") == ["version-1"] else None

    server.faults.append(Fault(deny, times=None))

    async def run() -> None:
        config = StreamConfig(endpoint_url=server.url, pin="version", transport=transport)  # type: ignore[arg-type]
        source = open_source("s3://bucket/m", config)
        (item,) = await source.list()
        with pytest.raises(AccessDeniedError, match="needs s3:GetObjectVersion"):
            await _read(source, item)
        await source.close()

    asyncio.run(run())


def test_files_that_are_named_are_looked_up_side_by_side(server: ObjectServer) -> None:
    """As each rank does for vLLM's sharded state, and everybody for the URL of a file."""
    keys = [key for key in OBJECTS if key.endswith(".safetensors")]
    asked: list[float] = []

    def slowly(request: Request, response: Response) -> None:
        asked.append(time.monotonic())
        response.delay_seconds = 1.0

    server.is_versioned = True
    for key in keys:
        server.put("bucket", f"m/{key}", OBJECTS[key])
    server.faults = [Fault(slowly, times=None, method="HEAD")]
    config = StreamConfig.resolve({**OPTIONS, "endpoint_url": server.url, "pin": "version", "idle_timeout_seconds": 5})

    async def run() -> None:
        source = open_source("s3://bucket/m", config)
        opened = await read_checkpoint(source, config, only=keys)
        assert [item.version for item in opened.items] == ["version-1", "version-2"]
        await source.close()

    asyncio.run(run())
    first, second = asked
    assert second - first < 0.9, "the second waited for the first"
