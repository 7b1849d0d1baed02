"""Digests made of a checkpoint find every byte that is not as it was, and name the tensor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import streamer
from streamer.artifacts.digests import differences, make_manifest
from streamer.checkpoint.manifest import MANIFEST_KEY, Manifest, parse_manifest
from streamer.cli.app import app
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, IntegrityError
from streamer.report import LoadReport
from streamer.sources.base import ObjectInfo
from streamer.sources.memory import MemorySource
from tests.servers.object_server import ObjectServer
from tests.servers.s3_client import s3_client
from tests.trace.loading import Model

BLOCK = 4096
STATE = {
    "a": torch.randn(64, 256),
    "b": torch.randn(300, 64).to(torch.bfloat16),
    "bias": torch.randn(7),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(1.5),
    "z": torch.randn(128, 128),
}
SHAPES: dict[str, tuple[int, ...]] = {"a": (64, 128), "b": (100, 64), "bias": (7,), "scalar": (), "z": (64, 128)}
OPTIONS: dict[str, Any] = {"integrity": "manifest", "request_bytes": 64 << 10, "header_read_bytes": 100}


def slices(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    held = dict(weights)
    model.a.copy_(held["a"][:, 128:])
    model.b.copy_(held["b"][150:250])
    model.bias.copy_(held["bias"])
    model.scalar.copy_(held["scalar"])
    model.z.copy_(held["z"][32:96])


def objects() -> dict[str, bytes]:
    first = {name: STATE[name] for name in ("a", "b", "empty")}
    second = {name: STATE[name] for name in ("bias", "scalar", "z")}
    return {
        "model-00001-of-00002.safetensors": safetensors.torch.save(first),
        "model-00002-of-00002.safetensors": safetensors.torch.save(second),
        "config.json": b"{}",
    }


def manifest_of(files: dict[str, bytes], block_bytes: int = BLOCK) -> Manifest:
    return asyncio.run(make_manifest(MemorySource(files), StreamConfig(), block_bytes=block_bytes))


def with_manifest(block_bytes: int = BLOCK) -> dict[str, bytes]:
    files = objects()
    return {**files, MANIFEST_KEY: manifest_of(files, block_bytes).to_json()}


def load(source: MemorySource, **options: Any) -> tuple[Model, LoadReport]:
    model = Model(slices, SHAPES)
    return model, streamer.load(model, source, {**OPTIONS, **options})


def check(model: Any) -> None:
    assert torch.equal(model.a, STATE["a"][:, 128:])
    assert torch.equal(model.b, STATE["b"][150:250].float())
    assert torch.equal(model.z, STATE["z"][32:96])


@pytest.mark.parametrize("mode", ["trace", "eager"])
@pytest.mark.parametrize("gap", [0, 512 << 10])
@pytest.mark.parametrize("block_bytes", [16, 4096, 1 << 20])
def test_a_right_checkpoint_loads(block_bytes: int, gap: int, mode: str) -> None:
    model, report = load(MemorySource(with_manifest(block_bytes)), mode=mode, coalesce_gap_bytes=gap)
    check(model)
    assert report.retries == 0
    assert report.fetched_bytes >= report.needed_bytes


class Damaging(MemorySource):
    """Flips one byte of what passes through, so many times."""

    def __init__(self, files: dict[str, bytes], key: str, at: int, times: int) -> None:
        super().__init__(files)
        self._at, self._file, self._times = at, key, times

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        await super().read_into(item, start, buffers)
        for buffer in buffers:
            if item.key == self._file and self._times and start <= self._at < start + len(buffer):
                buffer[self._at - start] ^= 1
                self._times -= 1
            start += len(buffer)


def place_of(files: dict[str, bytes], name: str, offset: int) -> tuple[str, int]:
    for key, file in manifest_of(files).files.items():
        for stretch in file.stretches:
            if stretch.name == name:
                return key, stretch.start + offset
    raise AssertionError(name)


DAMAGED = [("a", 64 * 256 * 4 - 1), ("b", 200 * 128), ("bias", 0), ("scalar", 3), ("z", 50 * 512), ("", 20)]


@pytest.mark.parametrize("mode", ["trace", "eager"])
@pytest.mark.parametrize(("name", "offset"), DAMAGED)
def test_damage_on_the_way_is_read_again(name: str, offset: int, mode: str) -> None:
    files = with_manifest()
    model, report = load(Damaging(files, *place_of(files, name, offset), times=1), mode=mode)
    check(model)
    assert report.retries == 1 or not name  # a header is read before the report begins to count


@pytest.mark.parametrize("mode", ["trace", "eager"])
@pytest.mark.parametrize(("name", "offset"), DAMAGED)
def test_damage_that_stays_is_named(name: str, offset: int, mode: str) -> None:
    files = with_manifest()
    with pytest.raises(IntegrityError, match=rf"the bytes of {name or 'the header'} are not those"):
        load(Damaging(files, *place_of(files, name, offset), times=99), mode=mode)


def test_bytes_that_nobody_needs_are_not_read() -> None:
    """Rows 0 to 31 of b are in blocks of their own, which no read covers."""
    files = with_manifest(1024)
    model, _ = load(Damaging(files, *place_of(files, "b", 0), times=99), coalesce_gap_bytes=0, mode="trace")
    check(model)


def test_an_uploaded_file_that_is_another_is_found_in_a_store(server: ObjectServer) -> None:
    files = with_manifest()
    for key, body in files.items():
        server.put("models", f"m/{key}", body)
    options = {**OPTIONS, "endpoint_url": server.url}
    model = Model(slices, SHAPES)
    streamer.load(model, "s3://models/m", options)
    check(model)
    key, at = place_of(files, "z", 50 * 512)
    changed = bytearray(files[key])
    changed[at] ^= 1
    server.put("models", f"m/{key}", bytes(changed))
    streamer.load(Model(slices, SHAPES), "s3://models/m", {**options, "integrity": "store"})  # nothing shows
    with pytest.raises(IntegrityError, match=rf"^s3://models/m/{key} bytes .*the bytes of z are not"):
        streamer.load(Model(slices, SHAPES), "s3://models/m", options)
    server.put("models", f"m/{key}", bytes(changed) + b"x")
    with pytest.raises(IntegrityError, match="the manifest says"):
        streamer.load(Model(slices, SHAPES), "s3://models/m", options)


def test_a_manifest_that_is_missing_or_knows_less_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"has no s3stream-manifest\.json.*verify URL --write"):
        load(MemorySource(objects()))
    files = with_manifest()
    files["model-00003-of-00003.safetensors"] = safetensors.torch.save({"new": torch.ones(1)})
    renamed = {key.replace("of-00002", "of-00003"): body for key, body in files.items()}
    with pytest.raises(IntegrityError, match="does not know this file"):
        load(MemorySource(renamed))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_manifest_never_passes_for_another(data: st.DataObject) -> None:
    """It is refused, or it still says what it said."""
    original = with_manifest(1 << 20)[MANIFEST_KEY]
    known = parse_manifest(original, "m")
    assert parse_manifest(known.to_json(), "m") == known
    body = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(body) - 1))
        body[position] = data.draw(st.integers(0, 255))
    try:
        parsed = parse_manifest(bytes(body), "m")
    except CheckpointError:
        return
    # Names, sizes and identities are held against the checkpoint itself; digests must not have changed.
    before = [stretch.digests for file in known.files.values() for stretch in file.stretches]
    assert [stretch.digests for file in parsed.files.values() for stretch in file.stretches] == before


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"null", b'{"format": 2, "algorithm": "x"}', b"[" * 100_000])
def test_what_is_no_manifest_is_refused(body: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_manifest(body, "m")


def test_differences_are_told_apart() -> None:
    files = objects()
    known = manifest_of(files)
    assert differences(known, manifest_of(files)) == []
    key, at = place_of(files, "b", 100)
    changed = bytearray(files[key])
    changed[at] ^= 1
    changed_files = {**files, key: bytes(changed), "config.json": b"{ }", "vocab.txt": b""}
    assert differences(known, manifest_of(changed_files)) == [
        f"{key}: tensor b has other bytes",
        "config.json has other content",
    ]


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, [*arguments, "--json", "--quiet"])
    return done.exit_code, json.loads(done.stdout) if done.stdout else {"stderr": done.stderr}


@pytest.mark.parametrize("where", ["s3", "local"])
def test_the_command_line(where: str, moto_url: str, tmp_path: Path) -> None:
    files = objects()
    url, options = str(tmp_path / "m"), []
    if where == "s3":
        url, options = "s3://manifests/m", ["--endpoint-url", moto_url]
        client = s3_client(moto_url)
        client.create_bucket(Bucket="manifests")

    def put(key: str, body: bytes) -> None:
        if where == "s3":
            client.put_object(Bucket="manifests", Key=f"m/{key}", Body=body)
        else:
            (tmp_path / "m").mkdir(exist_ok=True)
            (tmp_path / "m" / key).write_bytes(body)

    for key, body in files.items():
        put(key, body)
    assert run("verify", url, *options)[0] == 3  # no manifest yet
    code, document = run("verify", url, "--output", str(tmp_path / "manifest.json"), *options)
    assert (code, document["tensors"]) == (0, 5)
    code, document = run("verify", url, "--write", *options)
    assert (code, document["written"]) == (0, MANIFEST_KEY)
    code, document = run("verify", url, *options)
    assert (code, document["ok"], document["problems"]) == (0, True, [])
    written = parse_manifest((tmp_path / "manifest.json").read_bytes(), "m")
    assert written.files.keys() == manifest_of(files).files.keys()
    key, at = place_of(files, "a", 5000)
    changed = bytearray(files[key])
    changed[at] ^= 1
    put(key, bytes(changed))
    code, document = run("verify", url, *options)
    assert (code, document["ok"], document["problems"]) == (1, False, [f"{key}: tensor a has other bytes"])
    assert run("verify", url, "--write", "--output", "x", *options)[0] == 2
    if where == "s3":
        client.close()
