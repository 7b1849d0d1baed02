"""A machine that has too little of something: slower where that is possible, else one error with the remedy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from streamer.artifacts.metadata import pull
from streamer.config import StreamConfig
from streamer.errors import ConfigError, SourceUnavailableError
from streamer.sources import ObjectInfo, Source, open_source
from tests.servers.object_server import Fault, ObjectServer

BODY = bytes(range(256)) * 2000


def run_script(code: str, *arguments: str) -> dict[str, str]:
    """Run `code`, which prints one JSON document, in a process of its own, whose limits it may lower."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    document: dict[str, str] = json.loads(done.stdout)
    return document


# -- open files --------------------------------------------------------------------------------------

FEW_FILES = """
import json, os, resource, sys, torch
import streamer

url, transport, spare = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"endpoint_url": url, "transport": transport, "request_bytes": "64KiB", "retry_attempts": 3,
           "retry_first_wait_seconds": 0.01}

def load():
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(1_000_000))
    streamer.load(model, "s3://bucket/m", options)
    assert bool((model.weight == 1).all())

load()  # whatever is imported or cached on the way is there now
used = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, used + spare))
try:
    load()
    print(json.dumps({"outcome": "loaded"}))
except streamer.errors.StreamError as error:
    print(json.dumps({"outcome": type(error).__name__, "text": str(error)}))
"""


@pytest.fixture
def slow_store() -> Iterator[ObjectServer]:
    """Slow enough for all connections to be in use at once."""
    with ObjectServer(require_signature=True, bytes_per_second=4e6) as server:
        server.put("bucket", "m/model.safetensors", safetensors.torch.save({"weight": torch.ones(1_000_000)}))
        yield server


def test_few_files_mean_few_connections(slow_store: ObjectServer) -> None:
    """Three go to the event loop and one to the listing; with the rest the load is slower, and right."""
    before = slow_store.counters.requests["LIST"]
    outcome = run_script(FEW_FILES, slow_store.url, "native", "6")
    assert outcome == {"outcome": "loaded"}
    assert slow_store.counters.requests["LIST"] == before + 2


@pytest.mark.parametrize(("transport", "spare"), [("native", 3), ("native", 4), ("sdk", 5)])
def test_too_few_files_name_the_limit(slow_store: ObjectServer, transport: str, spare: int) -> None:
    outcome = run_script(FEW_FILES, slow_store.url, transport, str(spare))
    assert outcome["outcome"] in {"SourceError", "SourceUnavailableError"}
    assert "oo many open files" in outcome["text"]
    assert "ulimit -n" in outcome["text"]
    assert "check the endpoint" not in outcome["text"]


# -- disk --------------------------------------------------------------------------------------------

FULL_DISK = """
import json, os, resource, sys
from pathlib import Path
from streamer.artifacts.metadata import pull
from streamer.config import StreamConfig
from streamer.errors import StreamError

config = StreamConfig.resolve({"endpoint_url": sys.argv[1], "cache_dir": sys.argv[2]})
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # as on a full disk, writes fail from there on
try:
    pull("s3://bucket/m", config)
    result = {"outcome": "pulled"}
except StreamError as error:
    result = {"outcome": type(error).__name__, "text": str(error)}
result["left"] = " ".join(path.name for path in Path(sys.argv[2], "models").iterdir() if path.suffix != ".lock")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
folder = pull("s3://bucket/m", config).folder
result["again"] = str((folder / "tokenizer.json").stat().st_size)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
assert pull("s3://bucket/m", config).folder == folder
print(json.dumps(result))
"""


def test_a_full_disk_leaves_nothing_half_written(server: ObjectServer, tmp_path: Path) -> None:
    """What is complete, a later pull takes as it is, without writing."""
    server.put("bucket", "m/tokenizer.json", BODY)
    server.put("bucket", "m/model.safetensors", BODY)
    outcome = run_script(FULL_DISK, server.url, str(tmp_path / "cache"))
    assert outcome["outcome"] == "ConfigError"
    assert "File too large" in outcome["text"]
    assert str(tmp_path / "cache") in outcome["text"]
    assert "set cache_dir (S3STREAM_CACHE_DIR) to a folder that can be written to and has space" in outcome["text"]
    assert outcome["left"] == ""
    assert outcome["again"] == str(len(BODY))


@pytest.mark.parametrize("kind", ["below a file", "not a disk"])
def test_a_cache_that_cannot_be_written_to(server: ObjectServer, tmp_path: Path, kind: str) -> None:
    server.put("bucket", "m/config.json", b"{}")
    folder = Path("/proc/self/cache")
    if kind == "below a file":
        folder = tmp_path / "cache"
        folder.write_text("")
    config = StreamConfig.resolve({"endpoint_url": server.url, "cache_dir": str(folder)})
    with pytest.raises(ConfigError, match=r"cannot keep the files of s3://bucket/m/ in .*set cache_dir") as caught:
        pull("s3://bucket/m", config)
    assert str(folder) in str(caught.value)


READ_ONLY = """
import ctypes, json, sys
from pathlib import Path
from streamer.artifacts.metadata import pull
from streamer.config import StreamConfig
from streamer.errors import ConfigError

def config(folder):
    return StreamConfig.resolve({"endpoint_url": sys.argv[1], "cache_dir": folder})

pull("s3://bucket/m", config(sys.argv[2]))
Path(sys.argv[3]).mkdir(mode=0o555)
ctypes.CDLL(None).setfsuid(65534)  # to root, nothing is read-only; to others this does nothing
try:
    pull("s3://bucket/m", config(sys.argv[3]))
except ConfigError as error:
    print(json.dumps({"text": str(error)}))
"""


def test_a_read_only_cache(server: ObjectServer, tmp_path: Path) -> None:
    server.put("bucket", "m/config.json", b"{}")
    outcome = run_script(READ_ONLY, server.url, str(tmp_path / "first"), str(tmp_path / "second"))
    assert "Permission denied" in outcome["text"]
    assert f"in {tmp_path / 'second'}" in outcome["text"]
    assert "set cache_dir" in outcome["text"]


# -- names and addresses -----------------------------------------------------------------------------


def source_at(endpoint_url: str, transport: str) -> Source:
    options = {"retry_attempts": 2, "retry_first_wait_seconds": 0.01, "connect_timeout_seconds": 2.0}
    return open_source(
        "s3://bucket/m", StreamConfig.resolve({"endpoint_url": endpoint_url, "transport": transport, **options})
    )


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_a_host_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """The resolver's answer is made up here: a real question would leave this machine."""

    def unknown(host: str, *_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)

    async def run() -> None:
        source = source_at("http://store.invalid:9000", transport)
        try:
            with pytest.raises(SourceUnavailableError) as listing:
                await source.list()
            with pytest.raises(SourceUnavailableError) as reading:
                await source.read_into(ObjectInfo("a.bin", 100), 0, [memoryview(bytearray(10))])
        finally:
            await source.close()
        for caught in (listing, reading):
            text = str(caught.value)
            assert "store.invalid:9000" in text
            assert "Name or service not known" in text
            assert "check the endpoint" in text

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 5


@contextlib.contextmanager
def on_ipv6(port: int) -> Iterator[int]:
    """Relay connections to the IPv6 loopback address to `port` of the other one; yields the port there."""
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def relay(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            back = threading.Thread(target=pump, args=(server, client), daemon=True)
            back.start()
            pump(client, server)
            back.join()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=relay, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_an_ipv6_endpoint(server: ObjectServer, transport: str) -> None:
    server.put("bucket", "m/a.bin", BODY)
    hosts: list[str] = []

    async def run(url: str) -> None:
        source = source_at(url, transport)
        try:
            (item,) = await source.list()
            assert await source.stat("a.bin") == item
            buffer = bytearray(item.size)
            await source.read_into(item, 0, [memoryview(buffer)])
            assert buffer == BODY
        finally:
            await source.close()

    server.faults = [
        Fault(lambda request, _: hosts.append(request.headers["host"]), method=method, times=None)
        for method in ("LIST", "HEAD", "GET")
    ]
    with on_ipv6(server.port) as port:
        asyncio.run(run(f"http://[::1]:{port}"))
        assert hosts == [f"[::1]:{port}"] * 3
