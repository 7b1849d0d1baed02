"""URLs that go through fsspec: changes are noticed after the fact, messages hold no secret, chains work."""

from __future__ import annotations

import asyncio
import logging
import tarfile
import time
import uuid
import zipfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch

import streamer
from streamer.config import StreamConfig
from streamer.errors import (
    AccessDeniedError,
    MissingDependencyError,
    ObjectChangedError,
    SourceError,
    SourceUnavailableError,
)
from streamer.sources import ObjectInfo, open_source
from streamer.sources.fsspec_source import FsspecSource
from streamer.transport.failures import Place
from tests.servers.messages import Fault, Request, Response, error_response
from tests.servers.object_server import ObjectServer

QUICK = StreamConfig(retry_attempts=3, retry_first_wait_seconds=0.001)
BODY = safetensors.torch.save({"a": torch.arange(1000.0), "b": torch.ones(3, 4)})


@pytest.fixture
def memory() -> Iterator[tuple[Any, str]]:
    """The filesystem and a folder in it."""
    filesystem, folder = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    filesystem.pipe({f"{folder}/model.safetensors": BODY, f"{folder}/config.json": b"{}"})
    yield filesystem, folder
    filesystem.rm(folder, recursive=True)


def use(source: FsspecSource, work: Callable[[FsspecSource], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        try:
            return await work(source)
        finally:
            await source.close()

    return asyncio.run(run())


def source_for(url: str) -> FsspecSource:
    source = open_source(url, QUICK)
    assert isinstance(source, FsspecSource)
    return source


def test_loads_from_a_filesystem(memory: tuple[Any, str]) -> None:
    tensors = dict(streamer.iterate(f"memory:/{memory[1]}"))
    assert torch.equal(tensors["a"], torch.arange(1000.0))


def test_loads_out_of_a_chain(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        archive.writestr("model.safetensors", BODY)
    tensors = dict(streamer.iterate(f"zip://::file://{tmp_path}/m.zip"))
    assert torch.equal(tensors["b"], torch.ones(3, 4))


def test_loads_a_file_over_http() -> None:
    with ObjectServer() as server:
        server.put("models", "m/model.safetensors", BODY)
        tensors = dict(streamer.iterate(f"{server.url}/models/m/model.safetensors"))
        assert torch.equal(tensors["a"], torch.arange(1000.0))
        assert all(end - start < len(BODY) + 1 for _, start, end in server.counters.ranges)


@pytest.mark.parametrize("while_reading", [False, True])
def test_a_replaced_object_is_noticed(memory: tuple[Any, str], while_reading: bool) -> None:
    filesystem, folder = memory

    async def work(source: FsspecSource) -> None:
        items = {item.key: item for item in await source.list()}
        buffer = bytearray(100)
        await source.read_into(items["model.safetensors"], 0, [memoryview(buffer)])
        assert buffer == BODY[:100]
        if while_reading:
            plain = source._filesystem.cat_file

            def then_replaced(*args: Any, **kwargs: Any) -> bytes:
                read: bytes = plain(*args, **kwargs)
                filesystem.pipe(f"{folder}/model.safetensors", bytes(len(BODY)))
                return read

            source._filesystem.cat_file = then_replaced
        else:
            filesystem.pipe(f"{folder}/model.safetensors", bytes(len(BODY)))
        buffer = bytearray(100)
        with pytest.raises(ObjectChangedError, match=r"model\.safetensors bytes 50-149: the object changed"):
            await source.read_into(items["model.safetensors"], 50, [memoryview(buffer)])
        assert buffer == bytes(100)
        filesystem.rm(f"{folder}/model.safetensors")
        with pytest.raises(ObjectChangedError):
            await source.read_into(items["model.safetensors"], 0, [memoryview(buffer)])
        filesystem.pipe(f"{folder}/model.safetensors", BODY)

    use(source_for(f"memory:/{folder}"), work)


def test_reads_that_end_together_share_one_look(memory: tuple[Any, str]) -> None:
    async def work(source: FsspecSource) -> None:
        items = {item.key: item for item in await source.list()}
        item = items["model.safetensors"]
        looks = 0
        plain = source._filesystem.info

        def counted(path: str, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            return plain(path, **options)

        source._filesystem.info = counted
        place = Place(source.label(item.key), 0, 10)
        await asyncio.gather(*(source._require_unchanged(item, place) for _ in range(16)))
        assert looks == 1
        await source.read_into(item, 0, [memoryview(bytearray(10))])
        assert looks == 2  # an older look says nothing of a later read

    use(source_for(f"memory:/{memory[1]}"), work)


def test_failures_are_tried_again_and_named_without_secrets(memory: tuple[Any, str]) -> None:
    async def work(source: FsspecSource) -> None:
        items = {item.key: item for item in await source.list()}
        plain, failures = source._filesystem.cat_file, [OSError("https://host/?sig=SECRET")] * 2

        def failing(*args: Any, **kwargs: Any) -> bytes:
            if failures:
                raise failures.pop()
            read: bytes = plain(*args, **kwargs)
            return read

        source._filesystem.cat_file = failing
        buffer = bytearray(10)
        await source.read_into(items["model.safetensors"], 0, [memoryview(buffer)])
        assert buffer == BODY[:10]
        assert source.stats.retries == 2
        failures += [OSError("https://host/?sig=SECRET")] * 9
        with pytest.raises(SourceUnavailableError, match=r"failed with OSError \[3 attempts") as caught:
            await source.read_into(items["model.safetensors"], 0, [memoryview(buffer)])
        assert "SECRET" not in str(caught.value)
        assert caught.value.__cause__ is None or "SECRET" not in str(caught.value.__cause__)
        source._filesystem.cat_file = lambda *_, **__: b"short"
        with pytest.raises(Exception, match="5 bytes"):
            await source.read_into(items["model.safetensors"], 0, [memoryview(buffer)])

        def denied(*_: Any, **__: Any) -> bytes:
            raise PermissionError

        source._filesystem.cat_file = denied
        with pytest.raises(AccessDeniedError):
            await source.read_into(items["model.safetensors"], 0, [memoryview(buffer)])

    use(source_for(f"memory:/{memory[1]}"), work)


def test_a_filesystem_without_identities_says_so(memory: tuple[Any, str], caplog: pytest.LogCaptureFixture) -> None:
    async def work(source: FsspecSource) -> None:
        plain = source._filesystem.info
        source._filesystem.info = lambda path, **_: {"name": path, "size": plain(path)["size"]}
        with caplog.at_level(logging.WARNING, logger="streamer"):
            items = await source.list()
        assert all(item.pin is None for item in items)
        assert "does not say when an object is replaced" in caplog.text

    use(source_for(f"memory:/{memory[1]}"), work)


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("memory://user:pw@host/m", "memory://host/m"),
        ("simplecache::memory://key:pw@bucket/m?sig=abc", "simplecache::memory://bucket/m"),
        ("memory://m?token=abc", "memory://m"),
    ],
)
def test_labels_hold_no_secret(url: str, label: str) -> None:
    source = source_for(url)
    assert source.url.startswith(label)
    assert not any(secret in source.url for secret in ("pw", "abc"))
    assert not any(secret in repr(source) for secret in ("pw", "abc"))


def test_a_filesystem_that_is_not_installed_is_named() -> None:
    with pytest.raises(MissingDependencyError, match=r"az://bucket/m needs a package that is not installed"):
        open_source("az://bucket/m", StreamConfig())


# -- over HTTP, whose filesystem is asynchronous -----------------------------------------------------------

LONG = bytes(range(256)) * 40_000


@pytest.fixture
def web() -> Iterator[ObjectServer]:
    with ObjectServer(first_byte_seconds=0.1) as server:
        server.put("models", "m/a.bin", LONG)
        yield server


async def read(source: FsspecSource, item: ObjectInfo, start: int, end: int) -> bytes:
    buffer = bytearray(end - start)
    await source.read_into(item, start, [memoryview(buffer)])
    return bytes(buffer)


async def read_pieces(source: FsspecSource) -> None:
    item = await source.stat("a.bin")
    ranges = [(start, start + 40_000) for start in range(0, 640_000, 40_000)]
    bodies = await asyncio.gather(*(read(source, item, *ends) for ends in ranges))
    assert bodies == [LONG[start:end] for start, end in ranges]


def test_reads_are_concurrent(web: ObjectServer) -> None:
    source = source_for(f"{web.url}/models/m")
    began = time.monotonic()
    use(source, read_pieces)
    assert web.counters.most_open_connections >= 16
    assert time.monotonic() - began < 16 * 0.1  # the time to their first bytes, one after the other


@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_servers_are_asked_not_to_compress(web: ObjectServer, chain: str) -> None:
    asked: list[str | None] = []
    web.faults.append(Fault(lambda request, _: asked.append(request.headers.get("accept-encoding")), times=None))
    use(source_for(f"{chain}{web.url}/models/m"), read_pieces)
    assert set(asked) == {"identity"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # blockcache closes no file
@pytest.mark.parametrize("chain", ["simplecache", "filecache", "blockcache"])
def test_caches_are_asked_by_one_at_a_time(web: ObjectServer, chain: str) -> None:
    """Asked by several threads, these give short reads or zeros."""
    source = source_for(f"{chain}::{web.url}/models/m")
    use(source, read_pieces)
    assert web.counters.requests["GET"] <= 3


def test_archives_are_asked_by_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(LONG)
    with tarfile.open(tmp_path / "m.tar", "w") as archive:
        archive.add(tmp_path / "a.bin", "m/a.bin")

    async def many(source: FsspecSource) -> None:
        for _ in range(20):
            await read_pieces(source)

    use(source_for(f"tar://m::file://{tmp_path}/m.tar"), many)


def test_a_persistent_cache_is_held_against_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fsspec.config.conf["filecache"] = {"cache_storage": str(tmp_path / "cache")}
    (tmp_path / "m").mkdir()
    try:
        for body in (LONG, LONG[::-1]):
            (tmp_path / "m" / "a.bin").write_bytes(body)

            async def work(source: FsspecSource, body: bytes = body) -> None:
                assert await read(source, await source.stat("a.bin"), 10, 20) == body[10:20]

            assert "files of earlier runs" not in caplog.text
            use(source_for(f"filecache::file://{tmp_path}/m"), work)
        assert "files of earlier runs" in caplog.text
    finally:
        del fsspec.config.conf["filecache"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, AccessDeniedError), (401, AccessDeniedError), (404, ObjectChangedError), (400, SourceError)],
)
def test_refusals_are_final(web: ObjectServer, status: int, kind: type[SourceError]) -> None:
    async def work(source: FsspecSource) -> None:
        item = await source.stat("a.bin")
        web.faults.append(Fault(lambda request, response: error_response(status, "Because"), times=None))
        with pytest.raises(kind):
            await read(source, item, 0, 10)
        assert source.stats.retries == 0
        web.faults[:] = [Fault(lambda request, response: error_response(503, "SlowDown"), times=2)]
        assert await read(source, item, 0, 10) == LONG[:10]
        assert source.stats.retries == 2

    use(source_for(f"{web.url}/models/m"), work)


def test_what_stalls_is_given_up_and_what_is_cancelled_ends(web: ObjectServer) -> None:
    def stall(request: Request, response: Response) -> None:
        response.stall_after = 5

    async def work(source: FsspecSource) -> None:
        item = await source.stat("a.bin")
        web.faults.append(Fault(stall, times=None))
        with pytest.raises(SourceUnavailableError, match=r"did not answer within 0\.3 s"):
            await read(source, item, 0, 10)
        reading = asyncio.ensure_future(read(source, item, 0, 10))
        await asyncio.sleep(0.2)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        web.faults.clear()
        assert await read(source, item, 0, 10) == LONG[:10]

    source = open_source(f"{web.url}/models/m", QUICK.replace(retry_deadline_seconds=0.3))
    assert isinstance(source, FsspecSource)
    began = time.monotonic()
    use(source, work)
    assert time.monotonic() - began < 5
