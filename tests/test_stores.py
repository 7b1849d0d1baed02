"""Whole loads and the command line from every kind of URL besides s3:// and folders."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import streamer
from streamer.artifacts.metadata import pull, read_pins
from streamer.cli.app import app
from streamer.config import StreamConfig
from streamer.errors import IntegrityError, ObjectChangedError
from streamer.sources import open_source
from streamer.sources.pinned import PinnedSource
from tests.servers.fake_gcs import FakeGcs
from tests.servers.gcs import GcsServer
from tests.servers.messages import Fault, Request, Response
from tests.servers.object_server import ObjectServer

SHAPES = {"first.weight": (300, 128), "first.bias": (300,), "second.weight": (64, 300), "second.bias": (64,)}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def model() -> torch.nn.Module:
    layers = torch.nn.ModuleDict({"first": torch.nn.Linear(128, 300), "second": torch.nn.Linear(300, 64)})
    for parameter in layers.parameters():
        torch.nn.init.zeros_(parameter)
    return layers


def files() -> dict[str, bytes]:
    whole = tensors()
    shards = {
        f"model-0000{number}-of-00002.safetensors": {name: whole[name] for name in SHAPES if name.startswith(layer)}
        for number, layer in ((1, "first"), (2, "second"))
    }
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    return {
        "config.json": b'{"model_type": "nothing"}',
        "tokenizer/vocabulary.txt": b"a\nb\n",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{file: safetensors.torch.save(held) for file, held in shards.items()},
    }


class Place:
    """A URL with the checkpoint, and the options to reach it."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self.options = options

    @property
    def flags(self) -> list[str]:
        return [word for name, value in self.options.items() for word in ("--option", f"{name}={value}")]


@pytest.fixture(params=["gs own", "gs fake", "memory", "http", "s3stream", "s3stream+gs", "chain"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    kind, bucket = str(request.param), f"b-{uuid.uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        if kind == "gs fake":
            fake: FakeGcs = request.getfixturevalue("fake_gcs")
            fake.create_bucket(bucket)
            for name, body in files().items():
                fake.put(bucket, f"org/model/{name}", body)
            yield Place(f"gs://{bucket}/org/model", {"endpoint_url": fake.url, "anonymous": "true"})
        elif kind in ("memory", "chain"):
            memory = fsspec.filesystem("memory")
            memory.pipe({f"/{bucket}/org/model/{name}": body for name, body in files().items()})
            stack.callback(memory.rm, f"/{bucket}", recursive=True)
            yield Place(f"{'simplecache::' if kind == 'chain' else ''}memory://{bucket}/org/model", {})
        elif kind in ("gs own", "s3stream+gs"):
            server = stack.enter_context(GcsServer())
            for name, body in files().items():
                server.put(bucket, f"org/model/{name}", body)
            scheme = kind.split(" ")[0]
            yield Place(f"{scheme}://{bucket}/org/model", {"endpoint_url": server.url, "anonymous": "true"})
        else:
            objects = stack.enter_context(ObjectServer())
            for name, body in files().items():
                objects.put(bucket, f"org/model/{name}", body)
            if kind == "http":  # a single file, for a server of files has no listing
                objects.put(bucket, "org/model/model.safetensors", safetensors.torch.save(tensors()))
                yield Place(f"{objects.url}/{bucket}/org/model/model.safetensors", {})
            else:
                yield Place(f"s3stream://{bucket}/org/model", {"endpoint_url": objects.url})


def assert_loaded(module: torch.nn.Module) -> None:
    loaded = module.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize("mode", ["trace", "eager"])
def test_loads(place: Place, mode: str) -> None:
    module = model()
    report = streamer.load(module, place.url, {**place.options, "mode": mode, "verify": True})
    assert set(report.loaded) == set(SHAPES)
    assert_loaded(module)
    assert set(dict(streamer.iterate(place.url, place.options))) == set(SHAPES)


def test_inspect(place: Place) -> None:
    result = CliRunner().invoke(app, ["inspect", place.url, "--json", *place.flags])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["tensors"] == len(SHAPES)
    assert len(document["files"]) == (1 if place.url.startswith("http") else 2)


def test_what_engines_get(place: Place, tmp_path: Path) -> None:
    """As the vLLM plugin does it: a folder with what is not weights, and the weights by the pins in it."""
    if place.url.startswith("http"):
        return  # has no listing
    config = StreamConfig.resolve({**place.options, "cache_dir": str(tmp_path)})
    folder = pull(place.url, config).folder
    assert (folder / "config.json").read_bytes() == files()["config.json"]
    assert (folder / "tokenizer" / "vocabulary.txt").read_bytes() == b"a\nb\n"
    assert not list(folder.glob("*.safetensors"))
    pins = read_pins(folder)
    assert pins is not None
    assert pins.url.startswith(place.url.replace("s3stream+gs:", "gs:").replace("s3stream:", "s3:"))
    module = model()
    streamer.load(module, PinnedSource(open_source(pins.url, config), pins.items), config)
    assert_loaded(module)


# -- what GCS alone has ------------------------------------------------------------------------------------


@pytest.fixture
def gcs() -> Iterator[GcsServer]:
    with GcsServer() as server:
        for name, body in files().items():
            server.put("bucket", f"m/{name}", body)
        yield server


LAST = "m/model-00002-of-00002.safetensors"


def options(gcs: GcsServer, **more: object) -> dict[str, object]:
    return {"endpoint_url": gcs.url, "anonymous": True, "retry_first_wait_seconds": 0.001, **more}


def test_loads_are_held_against_the_checksums_that_gcs_keeps(gcs: GcsServer) -> None:
    module = model()
    report = streamer.load(module, "gs://bucket/m", options(gcs, integrity="checksums"))
    assert_loaded(module)
    assert report.checksums is not None
    assert report.checksums.unchecked_bytes == 0
    assert {file.algorithm for file in report.checksums.files.values()} == {"CRC32C"}

    def damaged(request: Request, response: Response) -> None:
        body = bytearray(response.body if isinstance(response.body, bytes) else b"")
        body[-1] ^= 1
        response.body = bytes(body)

    gcs.faults.append(Fault(damaged, key="00002-of", times=None))
    with pytest.raises(IntegrityError, match=r"gs://bucket/m/model-00002-of-00002\.safetensors.*CRC32C"):
        streamer.load(model(), "gs://bucket/m", options(gcs, integrity="checksums"))


def test_verify_holds_files_against_them_too(gcs: GcsServer, tmp_path: Path) -> None:
    flags = ["--option", f"endpoint_url={gcs.url}", "--anonymous", "--json"]
    manifest = str(tmp_path / "manifest.json")
    result = CliRunner().invoke(app, ["verify", "gs://bucket/m", "--output", manifest, *flags])
    assert result.exit_code == 0, result.output
    gcs.put("bucket", "m/s3stream-manifest.json", Path(manifest).read_bytes())
    module = model()
    streamer.load(module, "gs://bucket/m", options(gcs, integrity="manifest"))
    assert_loaded(module)


def test_a_shard_that_is_replaced_meanwhile(gcs: GcsServer) -> None:
    replaced: list[str] = []

    def replace(request: Request, response: Response) -> Response:
        if not replaced:
            replaced.append(request.key)
            gcs.put("bucket", LAST, files()["model-00002-of-00002.safetensors"][:-4] + b"....")
        return gcs.route(request)

    gcs.faults.append(Fault(replace, key="00002-of", times=None))
    with pytest.raises(ObjectChangedError, match="replaced or deleted during the load"):
        streamer.load(model(), "gs://bucket/m", options(gcs))
    replaced.clear()
    gcs.put("bucket", LAST, files()["model-00002-of-00002.safetensors"])
    gcs.is_versioned = True
    module = model()
    streamer.load(module, "gs://bucket/m", options(gcs, pin="version"))
    assert replaced
    assert_loaded(module)


def test_encoded_weights_are_refused_before_any_is_read(gcs: GcsServer) -> None:
    gcs.encodings["bucket", "m/model-00001-of-00002.safetensors"] = "gzip"
    with pytest.raises(OSError, match=r"model-00001-of-00002\.safetensors: it is stored with Content-Encoding: gzip"):
        streamer.load(model(), "gs://bucket/m", options(gcs))
