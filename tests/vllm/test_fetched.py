"""Folders that ``s3stream fetch`` filled, as the plugin sees them."""

from __future__ import annotations

from pathlib import Path

from streamer.artifacts.fetch import fetch
from streamer.artifacts.locate import Located, locate
from streamer.artifacts.metadata import Mode
from streamer.sources.partial import PartialSource
from tests.artifacts.fetching import ALL, OTHERS, URL, WEIGHTS, config_for, put_all
from tests.artifacts.rank_fetching import ALL as RANK_FILES
from tests.artifacts.rank_fetching import SHARDS, fetch_for, options, put
from tests.servers.object_server import ObjectServer
from vllm_s3stream.patches.folders import _listing, _reading_headers


def _locate(server: ObjectServer, folder: Path, mode: Mode) -> Located:
    put_all(server)
    config = config_for(server)
    fetch(URL, folder, config, mode=mode)

    def from_hub(*_: object) -> tuple[str, list[str]]:
        raise AssertionError("there is no need to ask the hub")

    return locate(str(folder), None, None, config, from_hub)


def test_weights_of_fetched_metadata_are_streamed_as_they_were_listed(server: ObjectServer, tmp_path: Path) -> None:
    located = _locate(server, tmp_path, "metadata")
    assert located.url == f"{URL}/"
    assert located.folder == tmp_path
    assert located.items is not None
    assert {item.key for item in located.items} == {*ALL, *OTHERS}
    assert all(item.pin == server.objects["models"][f"org/m/{item.key}"].etag for item in located.items)


def test_weights_that_were_fetched_are_read_from_disk(server: ObjectServer, tmp_path: Path) -> None:
    located = _locate(server, tmp_path, "all")
    assert located.items is None
    assert located.url == str(tmp_path)
    assert set(WEIGHTS) <= set(located.keys)


def test_weights_that_were_fetched_for_a_rank_are_read_from_disk(server: ObjectServer, tmp_path: Path) -> None:
    """Their files have other names there, and vLLM's questions are about the checkpoint's."""
    put(server, RANK_FILES)
    fetch_for(server, tmp_path, 1, mode="all")

    def from_hub(*_: object) -> tuple[str, list[str]]:
        raise AssertionError("there is no need to ask the hub")

    located = locate(str(tmp_path), None, None, options(server), from_hub)
    assert located.items is None
    assert located.url == str(tmp_path)
    assert set(RANK_FILES) <= set(located.keys)
    assert isinstance(located.source(options(server)), PartialSource)
    assert located.chosen(["model*.safetensors"]) == sorted(SHARDS)
    before = server.counters.connections
    headers = _reading_headers(lambda folder: {})(tmp_path)
    assert headers["model.norm.weight"] == {"dtype": "BF16", "shape": [256]}
    assert set(SHARDS) <= set(_listing(lambda folder: [])(str(tmp_path)))
    assert server.counters.connections == before, "all of it is here"
