"""Folders that hold only what some ranks need: what is on disk, and who may read it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import streamer
from streamer.artifacts.destination import WORK_FOLDER
from streamer.artifacts.fetch import fetch
from streamer.artifacts.metadata import PINS_FILE, read_pins
from streamer.checkpoint.regions import Intervals
from streamer.config import StreamConfig
from streamer.errors import IncompleteCheckpointError, NotFetchedError
from streamer.reference.config import LlamaConfig
from streamer.reference.engine import build_llama
from streamer.reference.parallel import Parallel
from streamer.sources.memory import MemorySource
from streamer.sources.open import open_source
from tests.artifacts.fetching import left_over, tree
from tests.artifacts.rank_fetching import (
    ALL,
    GAP,
    INDEX,
    METADATA,
    MODEL,
    SHARDS,
    TP,
    WEIGHTS,
    assert_loads,
    fetch_for,
    load,
    options,
    partial_in,
    planned,
    put,
)
from tests.servers.object_server import ObjectServer
from tests.share.together import Meeting, ThreadGroup


@pytest.fixture
def stored(server: ObjectServer) -> ObjectServer:
    put(server, ALL)
    return server


def data_on_disk(path: Path) -> list[tuple[int, int]]:
    """Return where a file has no holes, as the filesystem tells it."""
    with path.open("rb") as file:
        size, position, found = path.stat().st_size, 0, []
        while position < size:
            try:
                start = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError:
                break
            position = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found.append((start, position))
    return found


# -- what is on disk -----------------------------------------------------------------------------------


def test_the_bytes_on_disk_are_those_of_the_plan(stored: ObjectServer, tmp_path: Path) -> None:
    fetched = fetch_for(stored, tmp_path, 1)
    expected = planned(1)
    partial = partial_in(tmp_path)
    assert partial.files.keys() == SHARDS.keys()
    total = 0
    for key, body in SHARDS.items():
        file = partial.files[key]
        assert list(file.spans) == expected[key]
        path = tmp_path / WORK_FOLDER / file.name
        assert path.stat().st_size == len(body)
        on_disk = path.read_bytes()
        for start, end in file.spans:
            assert on_disk[start:end] == body[start:end]
        block = os.statvfs(tmp_path).f_bsize
        blocks = Intervals()
        for start, end in expected[key]:
            blocks.add(start // block * block, min(-(-end // block) * block, len(body)))
        holes = blocks.missing(0, len(body))
        assert sum(end - start for start, end in holes) > len(body) // 4, "this test is about holes"
        for start, end in data_on_disk(path):
            assert not blocks.missing(start, min(end, len(body)))
        assert path.stat().st_blocks * 512 <= blocks.nbytes + 16 * block
        total += sum(end - start for start, end in expected[key])
    assert fetched.nbytes == fetched.fetched_bytes == total + len(WEIGHTS[INDEX])
    assert (fetched.files, fetched.skipped, fetched.mode) == (3, 0, "weights")


def test_gaps_between_ranks_are_fetched_as_they_would_be_read(stored: ObjectServer, tmp_path: Path) -> None:
    fetch_for(stored, tmp_path, 3, 1)
    held = partial_in(tmp_path).files
    closed = 0
    for key, spans in planned(1, 3).items():
        expected = [spans[0]]  # the header, which is read by itself
        for start, end in spans[1:]:
            low, high = expected[-1]
            if len(expected) > 1 and start - high <= GAP:
                closed += start > high
                expected[-1] = low, end
            else:
                expected.append((start, end))
        assert list(held[key].spans) == expected
    assert closed, "this test is about gaps"


def test_nothing_has_a_name_that_a_plain_reader_would_open(stored: ObjectServer, tmp_path: Path) -> None:
    tmp_path /= "m"
    fetch_for(stored, tmp_path, 0, mode="all")
    assert tree(tmp_path).keys() == METADATA.keys() | {INDEX}
    assert not list(tmp_path.rglob("*.safetensors"))
    assert left_over(tmp_path) == sorted(file.name for file in partial_in(tmp_path).files.values())
    assert read_pins(tmp_path) is None, "an engine must load what is here"
    # An earlier version of ours, too, must not take the marker for one that it knows.
    assert json.loads((tmp_path / PINS_FILE).read_text())["format"] == 4
    os.unlink(tmp_path / PINS_FILE)
    with pytest.raises(IncompleteCheckpointError):
        dict(streamer.iterate(str(tmp_path)))


# -- who reads it --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"request_bytes": "256KiB"},
        {"request_bytes": "128KiB", "coalesce_gap_bytes": 0},
        {"overlap_tensors": 1},
        {"header_read_bytes": 1 << 20},
        {"verify": True},
    ],
    ids=str,
)
def test_a_rank_loads_from_the_folder_what_it_loads_from_the_store(
    stored: ObjectServer, tmp_path: Path, more: dict[str, Any]
) -> None:
    fetch_for(stored, tmp_path, 2, mode="all")
    before = stored.counters.connections
    assert_loads(tmp_path, 2, options(stored, **more))
    assert stored.counters.connections == before, "everything was read from the folder"


def test_other_ranks_layouts_and_readers_are_refused(stored: ObjectServer, tmp_path: Path) -> None:
    config = options(stored)
    fetch_for(stored, tmp_path, 2)
    for rank, tensor in ((1, TP), (0, 2), (0, 1)):
        with pytest.raises(NotFetchedError) as caught:
            load(str(tmp_path), rank, config, tensor)
        error = caught.value
        assert "holds only what rank 2 of engine reference with tp=4 needs" in str(error)
        assert error.url in {str(tmp_path / key) for key in SHARDS}
        assert f"{error.url} bytes {error.start}-" in str(error)
    with pytest.raises(NotFetchedError):
        dict(streamer.iterate(str(tmp_path), config))
    with pytest.raises(NotFetchedError):  # one file by its name
        dict(streamer.iterate(str(tmp_path / next(iter(SHARDS))), config))
    with pytest.raises(NotFetchedError):
        load(str(tmp_path), 2, options(stored, mode="eager"))
    with pytest.raises(NotFetchedError):  # a larger gap reads more
        load(str(tmp_path), 2, options(stored, coalesce_gap_bytes="1MiB"))
    with pytest.raises(NotFetchedError):
        fetch(str(tmp_path), tmp_path / "copy", config, mode="weights")


def test_every_byte_is_either_right_or_refused(stored: ObjectServer, tmp_path: Path) -> None:
    fetch_for(stored, tmp_path, 0)
    spans = planned(0)

    async def read_all() -> tuple[int, int]:
        source = open_source(str(tmp_path), options(stored))
        read = refused = 0
        for item in await source.list():
            body = SHARDS.get(item.key, b"")
            edges = sorted({edge for span in spans.get(item.key, []) for edge in span})
            for edge in edges:
                for start, end in ((edge - 3, edge), (edge - 1, edge + 1), (edge, edge + 3)):
                    if not 0 <= start < end <= len(body):
                        continue
                    is_there = any(low <= start and end <= high for low, high in spans[item.key])
                    buffer = bytearray(end - start)
                    try:
                        await source.read_into(item, start, [memoryview(buffer)])
                    except NotFetchedError:
                        assert not is_there
                        refused += 1
                        continue
                    assert is_there
                    assert buffer == body[start:end]
                    read += 1
        await source.close()
        return read, refused

    read, refused = asyncio.run(read_all())
    assert read > 20
    assert refused > 20


def test_ranks_that_share_load_together(stored: ObjectServer, tmp_path: Path) -> None:
    """They deal out what they need, and read gaps between what one needs and what another does."""
    fetch_for(stored, tmp_path, 1)
    fetch_for(stored, tmp_path, 2)
    assert {key: list(file.spans) for key, file in partial_in(tmp_path).files.items()} == planned(1, 2)
    meeting = Meeting(2)
    loaded: dict[int, dict[str, torch.Tensor]] = {}

    def work(place: int, rank: int) -> None:
        model = build_llama(LlamaConfig.from_dict(MODEL), Parallel(rank, TP), load_device="cpu")
        config = options(stored, share="require", buffer_bytes="64MiB")
        streamer.load(model, str(tmp_path), config, group=ThreadGroup(place, meeting))
        loaded[rank] = dict(model.named_parameters())

    threads = [threading.Thread(target=work, args=pair) for pair in ((0, 1), (1, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert loaded.keys() == {1, 2}
    for rank, found in loaded.items():
        for name, tensor in load(MemorySource(WEIGHTS), rank, StreamConfig()).items():
            assert torch.equal(found[name], tensor), name
