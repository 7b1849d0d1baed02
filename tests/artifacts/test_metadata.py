"""Folders with what is not weights: complete or absent, one per version, safe among processes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from streamer.artifacts.digests import make_manifest
from streamer.artifacts.metadata import PINS_FILE, metadata_folder, pull, read_pins
from streamer.checkpoint.manifest import MANIFEST_KEY
from streamer.config import StreamConfig
from streamer.errors import (
    CheckpointError,
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    SourceUnavailableError,
)
from streamer.sources.memory import MemorySource
from tests.servers.object_server import Fault, ObjectServer, error_response

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"words" * 1000,
    "processor/nested/preprocessor_config.json": b"[]",
    "modeling_custom.py": b"x = 1",
    "chat_template.jinja": b"{{ x }}",
    "merges.txt": b"",
}
WEIGHTS = {
    "model-00001-of-00001.safetensors": b"w" * 5000,
    "consolidated.safetensors": b"w" * 10,
    "pytorch_model.bin": b"p" * 10,
    "original/params.json": b"{}",
    ".git/HEAD": b"ref",
}


@pytest.fixture
def stored(server: ObjectServer) -> ObjectServer:
    for key, body in {**FILES, **WEIGHTS}.items():
        server.put("models", f"org/m/{key}", body)
    return server


def config_for(server: ObjectServer, tmp_path: Path, **options: object) -> StreamConfig:
    return StreamConfig.resolve({"endpoint_url": server.url, "cache_dir": str(tmp_path / "cache"), **options})


def contents(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found.pop(PINS_FILE)
    return found


def test_everything_but_weights_is_pulled_once(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored, tmp_path)
    pulled = pull("s3://models/org/m", config)
    assert contents(pulled.folder) == FILES
    assert {item.key for item in pulled.items} == {*FILES, *WEIGHTS}
    assert read_pins(pulled.folder) == pulled
    reads = stored.counters.requests["GET"]
    assert pull("s3://models/org/m/", config) == pulled
    assert stored.counters.requests["GET"] == reads


def test_weights_beside_the_model_come_along(stored: ObjectServer, tmp_path: Path) -> None:
    """Told from the model's own by the index, which names a file that is called as they might be."""
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "late.safetensors"}}
    beside = {"2_Dense/model.safetensors": b"dense", "3_Dense/pytorch_model.bin": b"bin", "head.safetensors": b"head"}
    indexed = {"model.safetensors.index.json": json.dumps(index).encode()}
    for key, body in {**beside, **indexed, "late.safetensors": b"w"}.items():
        stored.put("models", f"org/m/{key}", body)
    pulled = pull("s3://models/org/m", config_for(stored, tmp_path))
    assert contents(pulled.folder) == {**FILES, **beside, **indexed}


def test_a_changed_object_means_another_folder(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored, tmp_path)
    before = pull("s3://models/org/m", config)
    stored.put("models", "org/m/tokenizer.json", b"other")
    after = pull("s3://models/org/m", config)
    assert after.folder != before.folder
    assert contents(before.folder)["tokenizer.json"] == FILES["tokenizer.json"]  # a running engine still has it
    assert contents(after.folder)["tokenizer.json"] == b"other"
    stored.put("models", "org/m/model-00001-of-00001.safetensors", b"v" * 5000)  # same size
    assert pull("s3://models/org/m", config).folder not in (before.folder, after.folder)


def test_adapters_come_whole(stored: ObjectServer, tmp_path: Path) -> None:
    stored.put("models", "org/adapter/adapter_config.json", b"{}")
    stored.put("models", "org/adapter/adapter_model.safetensors", b"abc")
    pulled = pull("s3://models/org/adapter", config_for(stored, tmp_path), everything=True)
    assert contents(pulled.folder) == {"adapter_config.json": b"{}", "adapter_model.safetensors": b"abc"}


def test_a_failure_leaves_nothing_behind(stored: ObjectServer, tmp_path: Path) -> None:
    stored.faults.append(Fault(lambda *_: error_response(500, "InternalError"), key="tokenizer.json", times=None))
    config = config_for(stored, tmp_path, retry_attempts=2, retry_first_wait_seconds=0.001)
    with pytest.raises(SourceUnavailableError, match="org/m/tokenizer.json"):
        pull("s3://models/org/m", config)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []
    stored.faults.clear()
    assert contents(pull("s3://models/org/m", config).folder) == FILES


def test_a_changed_tokenizer_is_found_by_the_manifest(server: ObjectServer, tmp_path: Path) -> None:
    weights = safetensors.torch.save({"a": torch.ones(3)})
    files = {"config.json": b"{}", "tokenizer.json": b"words", "model.safetensors": weights}
    manifest = asyncio.run(make_manifest(MemorySource(files), StreamConfig()))
    for key, body in {**files, MANIFEST_KEY: manifest.to_json()}.items():
        server.put("models", f"m/{key}", body)
    config = config_for(server, tmp_path, integrity="manifest")
    pull("s3://models/m", config)
    server.put("models", "m/tokenizer.json", b"wordz")
    with pytest.raises(IntegrityError, match=r"s3://models/m/tokenizer\.json: the bytes are not those"):
        pull("s3://models/m", config)
    pull("s3://models/m", config.replace(integrity="store"))


def test_an_unfinished_folder_is_replaced(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored, tmp_path)
    folder = pull("s3://models/org/m", config).folder
    (folder / PINS_FILE).unlink()
    (folder / "tokenizer.json").write_bytes(b"half")
    assert contents(pull("s3://models/org/m", config).folder) == FILES


@pytest.mark.parametrize("key", ["../escape.json", "a/../../escape.json", "a//b.json", "./x.json", PINS_FILE])
def test_keys_that_would_leave_the_folder_are_refused(stored: ObjectServer, tmp_path: Path, key: str) -> None:
    stored.put("models", f"org/m/{key}", b"evil")
    with pytest.raises(CheckpointError, match="no path inside a folder"):
        pull("s3://models/org/m", config_for(stored, tmp_path), everything=True)
    assert not list(tmp_path.rglob("escape.json"))


def test_a_cache_that_cannot_be_written_is_named(stored: ObjectServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot keep the files of s3://models/org/m/.*S3STREAM_CACHE_DIR"):
        pull("s3://models/org/m", config_for(stored, tmp_path))


def test_a_missing_prefix_is_an_error(stored: ObjectServer, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError):
        pull("s3://models/org/none", config_for(stored, tmp_path))


def _pull(url: str, options: dict[str, str]) -> str:
    return str(pull(url, StreamConfig.resolve(options)).folder)


def test_processes_side_by_side_pull_once(stored: ObjectServer, tmp_path: Path) -> None:
    options = {"endpoint_url": stored.url, "cache_dir": str(tmp_path / "cache")}
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        folders = pool.starmap(_pull, [("s3://models/org/m", options)] * 8)
    assert len(set(folders)) == 1
    assert contents(Path(folders[0])) == FILES
    assert stored.counters.requests["GET"] == len([body for body in FILES.values() if body])


def test_local_folders_are_used_as_they_are(tmp_path: Path) -> None:
    config = StreamConfig(cache_dir=str(tmp_path / "cache"))
    assert metadata_folder(str(tmp_path), config) == tmp_path
    assert metadata_folder(f"file://{tmp_path}", config) == tmp_path
    assert read_pins(tmp_path) is None
    assert not (tmp_path / "cache").exists()


def test_pins_of_another_version_are_refused(stored: ObjectServer, tmp_path: Path) -> None:
    folder = pull("s3://models/org/m", config_for(stored, tmp_path)).folder
    for text in ("{", "[]", json.dumps({"format": 999})):
        (folder / PINS_FILE).write_text(text)
        with pytest.raises(ConfigError, match="not written by this version"):
            read_pins(folder)
    shutil.rmtree(folder)
