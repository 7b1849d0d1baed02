"""``s3stream://`` as a protocol of fsspec: what its users expect, on the data plane of loads."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import fsspec
import numpy as np
import pytest
from botocore.config import Config

from streamer.config import StreamConfig
from streamer.errors import AccessDeniedError, ConfigError, ObjectChangedError, ObjectNotFoundError
from streamer.fsspec_protocol import GcsStreamFileSystem, S3StreamFileSystem
from streamer.sources import open_source
from streamer.sources.gcs import GcsSource
from streamer.sources.s3 import S3Source
from tests.conftest import ACCESS_KEY, SECRET_KEY
from tests.servers.gcs import GcsServer
from tests.servers.messages import Fault, error_response
from tests.servers.object_server import ObjectServer

BODY = bytes(range(256)) * 4000


@pytest.fixture(autouse=True)
def registered() -> None:
    """As the installed package's entry points do, which a test of its own looks at."""
    for kind in (S3StreamFileSystem, GcsStreamFileSystem):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)


@dataclass
class Place:
    protocol: str
    bucket: str
    put: Callable[[str, bytes], None]
    options: dict[str, Any]

    def url(self, path: str = "") -> str:
        return f"{self.protocol}://{self.bucket}/{path}"

    @property
    def filesystem(self) -> Any:
        return fsspec.filesystem(self.protocol, **self.options)


@pytest.fixture(params=["moto", "own", "gcs"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    bucket = f"b-{uuid.uuid4().hex[:12]}"
    quick = {"retry_attempts": 2, "retry_first_wait_seconds": 0.001, "request_bytes": 65536}
    if request.param == "moto":
        endpoint = request.getfixturevalue("moto_url")
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(proxies={}),
        )
        client.create_bucket(Bucket=bucket)
        found = Place(
            "s3stream",
            bucket,
            lambda key, body: client.put_object(Bucket=bucket, Key=key, Body=body) and None,
            {"endpoint_url": endpoint, **quick},
        )
        yield found
        client.close()
    else:
        with GcsServer() if request.param == "gcs" else ObjectServer(require_signature=True) as server:
            server.objects[bucket] = {}
            protocol = "s3stream+gs" if request.param == "gcs" else "s3stream"
            given = {"endpoint_url": server.url, "anonymous": request.param == "gcs", **quick}
            found = Place(protocol, bucket, lambda key, body: server.put(bucket, key, body), given)
            yield found
    found.filesystem.close()


@pytest.fixture
def filled(place: Place) -> Place:
    for key in ("m/a.bin", "m/b.bin", "m/sub/c.bin", "m-v2/d.bin", "top.bin"):
        place.put(key, BODY)
    return place


def test_open_reads_as_a_file_does(filled: Place) -> None:
    with fsspec.open(filled.url("m/a.bin"), **filled.options) as file:
        assert file.read(10) == BODY[:10]
        file.seek(-5, io.SEEK_END)
        assert file.read() == BODY[-5:]
        file.seek(500_000)
        assert file.read(100_000) == BODY[500_000:600_000]
        assert file.size == len(BODY)
    filled.put("m/lines.csv", b"a,b\n1,2\n3,4\n")
    with fsspec.open(filled.url("m/lines.csv"), "rt", **filled.options) as text:
        assert text.readlines() == ["a,b\n", "1,2\n", "3,4\n"]
        text.seek(0)
    with fsspec.open(filled.url("m/lines.csv"), "r", **filled.options) as text:
        assert np.loadtxt(text, delimiter=",", skiprows=1).tolist() == [[1, 2], [3, 4]]


def test_what_cat_gives(filled: Place) -> None:
    filesystem = filled.filesystem
    path = f"{filled.bucket}/m/a.bin"
    assert filesystem.cat_file(path) == BODY == filesystem.cat(filled.url("m/a.bin"))
    for start, end in ((0, 10), (5, None), (None, 7), (-10, None), (-10, -3), (10, 5), (1_000_000, 2_000_000)):
        assert filesystem.cat_file(path, start, end) == BODY[start:end]
    assert isinstance(filesystem.cat_file(path, 0, 10), bytes)
    assert filesystem.cat([f"{filled.bucket}/m/a.bin", f"{filled.bucket}/top.bin"]).keys() == {
        f"{filled.bucket}/m/a.bin",
        f"{filled.bucket}/top.bin",
    }
    assert filesystem.head(path, 3) == BODY[:3]


def test_ranges(filled: Place) -> None:
    filesystem, bucket = filled.filesystem, filled.bucket
    paths = [f"{bucket}/m/a.bin"] * 20 + [f"{bucket}/top.bin"] * 20
    starts = [number * 1000 for number in range(40)]
    ends = [start + 3000 for start in starts]
    assert filesystem.cat_ranges(paths, starts, ends) == [BODY[a:b] for a, b in zip(starts, ends, strict=True)]
    assert filesystem.cat_ranges(paths[:2], 5, 9) == [BODY[5:9]] * 2
    bad = filesystem.cat_ranges([f"{bucket}/m/a.bin", f"{bucket}/none"], [0, 0], [4, 4])
    assert bad[0] == BODY[:4]
    assert isinstance(bad[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        filesystem.cat_ranges([f"{bucket}/m/a.bin", f"{bucket}/none"], [0, 0], [4, 4], on_error="raise")
    with pytest.raises(ValueError, match="as many"):
        filesystem.cat_ranges(paths, [0], [4])


def test_ranges_are_concurrent() -> None:
    with ObjectServer(first_byte_seconds=0.05) as server:
        server.put("b", "a.bin", BODY)
        filesystem = fsspec.filesystem("s3stream", endpoint_url=server.url, request_bytes=65536)
        filesystem.cat_ranges(["b/a.bin"] * 16, list(range(16)), list(range(100, 116)))
        assert server.counters.most_open_connections >= 16
        assert server.counters.requests["HEAD"] == 1
        server.counters.ranges.clear()
        assert filesystem.cat_file("b/a.bin") == BODY
        assert len(server.counters.ranges) == -(-len(BODY) // 65536)
        filesystem.close()


def test_info_and_folders(filled: Place) -> None:
    filesystem, bucket = filled.filesystem, filled.bucket
    info = filesystem.info(filled.url("m/a.bin"))
    assert (info["name"], info["size"], info["type"]) == (f"{bucket}/m/a.bin", len(BODY), "file")
    assert info.get("ETag") or info.get("generation")
    assert filesystem.ukey(filled.url("m/a.bin")) == filesystem.ukey(f"{bucket}/m/a.bin")
    for folder in (f"{bucket}/m", f"{bucket}/m/", bucket, filled.url()):
        assert filesystem.info(folder)["type"] == "directory"
    assert filesystem.ls(f"{bucket}/m", detail=False) == [
        f"{bucket}/m/a.bin",
        f"{bucket}/m/b.bin",
        f"{bucket}/m/sub",
    ]
    assert filesystem.ls(bucket, detail=False) == [f"{bucket}/m", f"{bucket}/m-v2", f"{bucket}/top.bin"]
    assert {entry["type"] for entry in filesystem.ls(f"{bucket}/m")} == {"file", "directory"}
    assert filesystem.ls(f"{bucket}/top.bin", detail=False) == [f"{bucket}/top.bin"]
    inside = [f"{bucket}/m/a.bin", f"{bucket}/m/b.bin", f"{bucket}/m/sub/c.bin"]
    assert filesystem.find(f"{bucket}/m") == inside
    assert filesystem.find(f"{bucket}/m", detail=True)[inside[2]]["size"] == len(BODY)
    assert filesystem.find(f"{bucket}/m", maxdepth=1) == inside[:2]
    assert filesystem.find(f"{bucket}/m", withdirs=True) == [f"{bucket}/m", *inside[:2], f"{bucket}/m/sub", inside[2]]
    assert filesystem.find(f"{bucket}/top.bin") == [f"{bucket}/top.bin"]
    assert filesystem.find(f"{bucket}/nowhere") == []
    assert filesystem.glob(f"{bucket}/m/*.bin") == inside[:2]
    assert filesystem.exists(f"{bucket}/m/a.bin")
    assert not filesystem.exists(f"{bucket}/m/none")
    assert filesystem.isdir(f"{bucket}/m")
    assert filesystem.isfile(f"{bucket}/m/a.bin")
    assert not filesystem.isfile(f"{bucket}/m")


def test_errors_are_those_that_users_of_fsspec_expect(filled: Place) -> None:
    filesystem, bucket = filled.filesystem, filled.bucket
    calls: tuple[Callable[[], Any], ...] = (
        lambda: filesystem.cat_file(f"{bucket}/none"),
        lambda: filesystem.info(f"{bucket}/none"),
        lambda: filesystem.ls(f"{bucket}/none"),
        lambda: fsspec.open(filled.url("none"), **filled.options).open(),
    )
    for call in calls:
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert isinstance(caught.value, ObjectNotFoundError)
    with pytest.raises(FileNotFoundError):
        filesystem.ls("there-is-no-such-bucket-here/m")
    with pytest.raises(IsADirectoryError):
        filesystem.cat_file(bucket)
    for mode in ("wb", "ab", "w"):
        with pytest.raises(io.UnsupportedOperation, match="read-only"):
            filesystem.open(f"{bucket}/m/new", mode)
    with pytest.raises(ConfigError, match="did you mean anonymous"):
        fsspec.filesystem(filled.protocol, anonymus=True)


def test_refusals_are_permission_errors() -> None:
    with ObjectServer() as server:
        server.put("b", "a.bin", BODY)
        filesystem = fsspec.filesystem("s3stream", endpoint_url=server.url)
        for kind in ("HEAD", "GET"):
            server.faults[:] = [Fault(lambda *_: error_response(403, "AccessDenied"), times=None, method=kind)]
            with pytest.raises(PermissionError) as caught:
                filesystem.cat_file("b/a.bin")
            assert isinstance(caught.value, AccessDeniedError)
        filesystem.close()


def test_an_open_file_is_of_one_piece_and_a_new_call_sees_the_new(filled: Place) -> None:
    filesystem, bucket = filled.filesystem, filled.bucket
    with filesystem.open(f"{bucket}/m/a.bin", cache_type="none") as file:
        assert file.read(10) == BODY[:10]
        filled.put("m/a.bin", BODY[::-1])
        with pytest.raises(ObjectChangedError):
            file.read(10)
    assert filesystem.cat_file(f"{bucket}/m/a.bin", 0, 10) == BODY[::-1][:10]
    filled.put("m/a.bin", b"short")
    assert filesystem.cat_file(f"{bucket}/m/a.bin") == b"short"
    assert filesystem.info(f"{bucket}/m/a.bin")["size"] == 5


def test_get_and_caches(filled: Place, tmp_path: Path) -> None:
    filled.filesystem.get(filled.url("m"), str(tmp_path / "got"), recursive=True)
    assert (tmp_path / "got" / "sub" / "c.bin").read_bytes() == BODY
    with fsspec.open(f"simplecache::{filled.url('m/a.bin')}", **{filled.protocol: filled.options}) as file:
        assert file.read() == BODY
    mapper = filled.filesystem.get_mapper(f"{filled.bucket}/m")
    assert mapper["sub/c.bin"] == BODY
    assert set(mapper) == {"a.bin", "b.bin", "sub/c.bin"}


def test_odd_keys(place: Place) -> None:
    for key in ("m/with space.bin", "m/plus+.bin", "m/percent%20.bin", "m/hash#.bin", "m/é.bin", "m/q?.bin"):
        place.put(key, key.encode())
        assert place.filesystem.cat_file(f"{place.bucket}/{key}") == key.encode()
    assert len(place.filesystem.find(f"{place.bucket}/m")) == 6


def test_in_an_event_loop_of_ones_own(filled: Place) -> None:
    async def work() -> None:
        filesystem = fsspec.filesystem(filled.protocol, asynchronous=True, **filled.options)
        assert await filesystem._cat_file(f"{filled.bucket}/m/a.bin", 0, 10) == BODY[:10]
        assert await filesystem._cat_ranges([f"{filled.bucket}/m/a.bin"], [3], [6]) == [BODY[3:6]]
        await filesystem._close()

    asyncio.run(work())


def test_pickled_it_is_the_same(filled: Place) -> None:
    other = pickle.loads(pickle.dumps(filled.filesystem))
    assert other == filled.filesystem
    assert other.cat_file(f"{filled.bucket}/m/a.bin", 0, 5) == BODY[:5]


def test_an_access_point_is_a_bucket() -> None:
    filesystem = fsspec.filesystem("s3stream", endpoint_url="http://127.0.0.1:9")
    arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine"
    source, key = filesystem._split(f"s3stream://{arn}/folder/a.bin")
    assert (source.url, key) == (f"s3://{arn}/", "folder/a.bin")


def test_the_library_takes_these_urls_for_those_of_the_stores() -> None:
    config = StreamConfig(anonymous=True)
    first, second = open_source("s3stream://bucket/m", config), open_source("s3stream+gs://bucket/m", config)
    assert isinstance(first, S3Source)
    assert first.url == "s3://bucket/m/"
    assert isinstance(second, GcsSource)
    assert second.url == "gs://bucket/m/"


PROGRAM = """
import json, sys, fsspec
options = json.loads(sys.argv[2])
with fsspec.open(sys.argv[1], **options) as file:
    print(json.dumps([file.read(4).hex(), type(file.fs).__module__]))
"""


def test_a_process_that_only_knows_fsspec(filled: Place) -> None:
    """Finds the protocol by the entry point, and leaves no warning when it ends without closing anything."""
    arguments = [sys.executable, "-W", "error", "-c", PROGRAM, filled.url("m/a.bin"), json.dumps(filled.options)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [BODY[:4].hex(), "streamer.fsspec_protocol"]
    assert not done.stderr
