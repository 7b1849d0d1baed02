"""A copy is held against what it was copied from, and what differs is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from streamer.checkpoint.manifest import MANIFEST_KEY
from tests.artifacts.test_manifest import objects, place_of, run, with_manifest

FILES = objects()
FIRST, SECOND = sorted(key for key in FILES if key.endswith(".safetensors"))


def put(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir()
    for key, body in files.items():
        (folder / key).write_bytes(body)
    return folder


@pytest.fixture(params=["manifest", "bytes"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return put(tmp_path / "source", with_manifest() if request.param == "manifest" else FILES)


def fetched(source: Path, tmp_path: Path, *options: str) -> Path:
    code, document = run("fetch", str(source), str(tmp_path / "copy"), *options)
    assert code == 0, document
    return tmp_path / "copy"


def flip(copy: Path, key: str, at: int) -> None:
    body = bytearray((copy / key).read_bytes())
    body[at] ^= 1
    (copy / key).write_bytes(body)


def test_a_copy_by_anybody(source: Path, tmp_path: Path) -> None:
    copy = put(tmp_path / "copy", FILES)
    code, document = run("verify", str(source), str(copy))
    assert (code, document["ok"], document["problems"]) == (0, True, [])
    how = "manifest" if (source / MANIFEST_KEY).exists() else "bytes"
    assert (document["compared_with"], document["tensors"], document["files"]) == (how, 5, 3)


@pytest.mark.parametrize("mode", ["metadata", "weights", "all"])
def test_a_copy_that_was_fetched_need_hold_no_more_than_its_mode(source: Path, tmp_path: Path, mode: str) -> None:
    copy = fetched(source, tmp_path, "--mode", mode)
    code, document = run("verify", str(source), str(copy))
    assert (code, document["problems"]) == (0, [])
    assert document["tensors"] == (0 if mode == "metadata" else 5)


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a byte": (lambda copy: flip(copy, *place_of(FILES, "z", 3000)), [f"{SECOND}: tensor z has other bytes"]),
    "configuration": (lambda copy: (copy / "config.json").write_text("{ }"), ["config.json has other content"]),
    "no configuration": (lambda copy: (copy / "config.json").unlink(), ["config.json is missing"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_differs_is_named(source: Path, tmp_path: Path, damage: str) -> None:
    copy = put(tmp_path / "copy", FILES)
    spoil, expected = DAMAGE[damage]
    spoil(copy)
    code, document = run("verify", str(source), str(copy))
    assert (code, document["ok"], document["problems"]) == (1, False, expected)


def test_what_is_not_weights_is_compared_in_any_mode(source: Path, tmp_path: Path) -> None:
    copy = fetched(source, tmp_path, "--mode", "metadata")
    (copy / "config.json").write_text("{ }")
    code, document = run("verify", str(source), str(copy))
    assert (code, document["problems"]) == (1, ["config.json has other content"])


def test_half_a_copy_is_no_checkpoint(source: Path, tmp_path: Path) -> None:
    copy = put(tmp_path / "copy", FILES)
    (copy / SECOND).unlink()
    code, document = run("verify", str(source), str(copy))
    assert code == 3
    assert "model-00002-of-00002" in document["stderr"]


def test_a_marker_of_another_version_is_not_guessed_at(source: Path, tmp_path: Path) -> None:
    copy = fetched(source, tmp_path, "--mode", "all")
    marker = copy / ".s3stream.json"
    marker.write_text(marker.read_text().replace('"format": 3', '"format": 3000'))
    assert run("verify", str(source), str(copy))[0] == 2


def test_there_must_be_a_folder_and_one_wish(source: Path, tmp_path: Path) -> None:
    assert run("verify", str(source), str(tmp_path / "nowhere"))[0] == 4
    assert run("verify", str(source), str(tmp_path), "--write")[0] == 2
