"""Folders of some ranks that are fetched into again: killed, extended, completed, outdated, damaged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from streamer.artifacts.check import check
from streamer.artifacts.destination import WORK_FOLDER
from streamer.artifacts.digests import make_manifest
from streamer.artifacts.fetch import fetch
from streamer.artifacts.metadata import PINS_FILE, read_marker
from streamer.checkpoint.manifest import MANIFEST_KEY
from streamer.config import StreamConfig
from streamer.errors import (
    AccessDeniedError,
    ConfigError,
    DestinationError,
    IncompleteCheckpointError,
    NoSpaceError,
    NotFetchedError,
    ObjectChangedError,
    ObjectNotFoundError,
)
from streamer.sources.memory import MemorySource
from streamer.sources.open import open_source
from tests.artifacts.fetching import URL, left_over, start, tree
from tests.artifacts.rank_fetching import (
    ALL,
    GAP,
    INDEX,
    METADATA,
    SHARDS,
    TP,
    WEIGHTS,
    assert_loads,
    fetch_for,
    layout_of,
    load,
    options,
    partial_in,
    planned,
    put,
)
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response

RANK_OPTIONS = ("--mode", "weights", "--tp", str(TP), "-o", f"coalesce_gap_bytes={GAP}")


@pytest.fixture
def stored(server: ObjectServer) -> ObjectServer:
    put(server, ALL)
    return server


def nbytes_of(*ranks: int) -> int:
    return sum(end - start for spans in planned(*ranks).values() for start, end in spans)


def assert_true(folder: Path, shards: dict[str, bytes] = SHARDS) -> None:
    """Hold all that the marker says is there against what is stored."""
    for key, file in partial_in(folder).files.items():
        body = (folder / WORK_FOLDER / file.name).read_bytes()
        assert len(body) == len(shards[key])
        for low, high in file.spans:
            assert body[low:high] == shards[key][low:high], key


# -- more ----------------------------------------------------------------------------------------------


def test_what_is_complete_costs_one_listing_and_no_trace(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_for(stored, tmp_path, 0, 1)
    before = stored.counters.requests.copy()
    monkeypatch.setattr("streamer.cli.traced.dry_run", None)
    again = fetch_for(stored, tmp_path, 1)
    assert stored.counters.requests - before == {"LIST": 1}
    assert (again.files, again.skipped, again.fetched_bytes) == (3, 3, 0)
    assert again.partial is not None
    assert again.partial.layouts[0].ranks == (0, 1)
    assert_loads(tmp_path, 1, options(stored))


def test_ranks_and_modes_add_up(stored: ObjectServer, tmp_path: Path) -> None:
    tmp_path /= "m"
    config = options(stored)
    fetch(URL, tmp_path, config)
    first = fetch_for(stored, tmp_path, 0)
    assert (first.mode, first.skipped) == ("all", 3)
    names = {file.name for file in partial_in(tmp_path).files.values()}
    second = fetch_for(stored, tmp_path, 2)
    assert second.fetched_bytes == sum(file.nbytes for file in partial_in(tmp_path).files.values()) - nbytes_of(0)
    assert {file.name for file in partial_in(tmp_path).files.values()} == names
    (layout,) = partial_in(tmp_path).layouts
    assert layout.ranks == (0, 2)
    other = fetch_for(stored, tmp_path, 1, tensor=2)
    assert [str(one) for one in partial_in(tmp_path).layouts] == [
        "ranks 0, 2 of engine reference with tp=4",
        "rank 1 of engine reference with tp=2",
    ]
    assert other.fetched_bytes < nbytes_of(2, 3), "some of it was there"
    less = fetch(URL, tmp_path, config, mode="metadata")
    assert (less.mode, less.fetched_bytes, less.partial) == ("all", 0, partial_in(tmp_path))
    assert tree(tmp_path) == {**METADATA, INDEX: WEIGHTS[INDEX]}
    assert_true(tmp_path)
    for rank in (0, 2):
        assert_loads(tmp_path, rank, config)


@pytest.mark.parametrize("mode", ["weights", "all"])
def test_the_rest_completes_the_folder(stored: ObjectServer, tmp_path: Path, mode: Any) -> None:
    tmp_path /= "m"
    config = options(stored)
    fetch_for(stored, tmp_path, 3, mode=mode)
    held = {f"org/m/{key}": list(file.spans) for key, file in partial_in(tmp_path).files.items()}
    before = len(stored.counters.ranges)
    done = fetch(URL, tmp_path, config, mode=mode)
    expected = ALL if mode == "all" else WEIGHTS
    assert tree(tmp_path) == expected
    missing = sum(map(len, SHARDS.values())) - nbytes_of(3)
    assert (done.fetched_bytes, done.resumed_bytes, done.partial) == (missing, nbytes_of(3), None)
    for key, low, high in stored.counters.ranges[before:]:
        assert not any(max(low, start) < min(high, end) for start, end in held.get(key, [])), "fetched again"
    assert left_over(tmp_path) == []
    marker = read_marker(tmp_path)
    assert marker is not None
    assert (marker.partial, marker.mode) == (None, mode)
    assert json.loads((tmp_path / PINS_FILE).read_text())["format"] == 3
    assert_loads(tmp_path, 0, config)
    assert fetch_for(stored, tmp_path, 1, mode=mode).fetched_bytes == 0, "a whole folder has what any rank needs"
    assert tree(tmp_path) == expected


def test_a_completion_that_fails_leaves_no_marker_and_ranks_can_be_fetched_for_again(
    stored: ObjectServer, tmp_path: Path
) -> None:
    tmp_path /= "m"
    config = options(stored, concurrency=1)
    fetch_for(stored, tmp_path, 0)
    first, second = SHARDS

    def refuse(request: Request, response: Response) -> Response:
        return error_response(403, "AccessDenied")

    stored.faults = [Fault(refuse, key=f"org/m/{second}", method="GET", times=None)]
    with pytest.raises(AccessDeniedError):
        fetch(URL, tmp_path, config, mode="weights")
    assert tree(tmp_path) == {first: SHARDS[first], INDEX: WEIGHTS[INDEX]}
    assert read_marker(tmp_path) is None, "it would speak of a file that has its name now"
    with pytest.raises(IncompleteCheckpointError):
        load(str(tmp_path), 0, config)
    stored.faults = []
    again = fetch_for(stored, tmp_path, 0, 1)
    assert partial_in(tmp_path).files.keys() == {second}
    assert again.skipped == 2
    assert_true(tmp_path)
    for rank in (0, 1):
        assert_loads(tmp_path, rank, config)
    with pytest.raises(NotFetchedError):
        load(str(tmp_path), 3, config)


def test_all_ranks_alone_need_all_of_the_file_which_gets_its_name(stored: ObjectServer, tmp_path: Path) -> None:
    tmp_path /= "m"
    fetched = fetch_for(stored, tmp_path, 0, tensor=1, mode="all")
    assert fetched.partial is None
    assert tree(tmp_path) == ALL


# -- ended ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", [("--rank", "1", *RANK_OPTIONS), ("--mode", "all")], ids=["rank", "all"])
def test_killed_and_gone_on_with(tmp_path: Path, then: tuple[str, ...]) -> None:
    folder = tmp_path / "m"
    environ = ("env", f"S3STREAM_CACHE_DIR={tmp_path / 'cache'}")
    with ObjectServer(bytes_per_second=1_500_000.0) as server:
        put(server, ALL)
        seen: list[tuple[str, int, int]] = []
        for kill in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
            before = len(seen)
            begun = server.counters.body_bytes
            process = start(server, folder, "--rank", "1", *RANK_OPTIONS, before=environ)
            limit = time.monotonic() + 60
            while server.counters.body_bytes < begun + nbytes_of(1) // 3:
                assert process.poll() is None
                assert time.monotonic() < limit
                time.sleep(0.005)
            process.send_signal(kill)
            process.communicate()
            seen = list(server.counters.ranges)
            assert len(seen) > before
            assert not (folder / PINS_FILE).exists()
            with pytest.raises(Exception, match="has no safetensors files|lacks"):
                load(str(folder), 1, StreamConfig())
        before = len(server.counters.ranges)
        process = start(server, folder, *then, "--json", before=environ)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        document = json.loads(out)
        # Each was on its way to a third, of which headers and what was under way are lost.
        assert document["resumed_bytes"] > nbytes_of(1) // 10
        read = sum(high - low for key, low, high in server.counters.ranges[before:] if key.endswith(".safetensors"))
        headers = len(SHARDS) * StreamConfig().header_read_bytes
        assert read <= document["fetched_bytes"] + headers, "nothing that is here is fetched again"
        if "--rank" in then:
            assert {key: list(file.spans) for key, file in partial_in(folder).files.items()} == planned(1)
            assert_true(folder)
            assert document["resumed_bytes"] + document["fetched_bytes"] == nbytes_of(1)
            assert document["sources"][0]["partial"]["layouts"] == [
                {"engine": "reference", "tp": TP, "pp": 1, "ep": False, "ranks": [1]}
            ]
        else:
            assert tree(folder) == ALL
        assert_loads(folder, 1, options(server))


def test_several_at_once_wait_for_each_other(stored: ObjectServer, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    environ = ("env", f"S3STREAM_CACHE_DIR={tmp_path / 'cache'}")
    processes = [start(stored, folder, "--rank", str(rank), *RANK_OPTIONS, before=environ) for rank in (0, 3)]
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    (layout,) = partial_in(folder).layouts
    assert layout.ranks == (0, 3)
    assert_true(folder)
    for rank in (0, 3):
        assert_loads(folder, rank, options(stored))


def test_without_locks_what_the_marker_says_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, os.strerror(95))

    folder = tmp_path / "m"
    outcomes: list[str] = []
    with ObjectServer(bytes_per_second=20e6) as server:
        put(server, ALL)
        fetch(URL, tmp_path / "other", options(server))  # so that all find the metadata
        fetch_for(server, tmp_path / "other", 0)
        monkeypatch.setattr("fcntl.flock", no_locks)

        def run(rank: int) -> None:
            try:
                fetch_for(server, folder, rank)
                outcomes.append("done")
            except DestinationError as error:
                outcomes.append(str(error))

        monkeypatch.setattr("streamer.cli.traced._metadata", lambda *_: tmp_path / "other")
        for _ in range(2):
            threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert_true(folder)
        assert len(outcomes) == 6
        assert "done" in outcomes
        fetch(URL, folder, options(server), mode="all")
        assert tree(folder) == ALL


# -- changed and damaged -------------------------------------------------------------------------------


def test_replaced_weights_are_fetched_anew_and_older_ranks_forgotten(stored: ObjectServer, tmp_path: Path) -> None:
    config = options(stored)
    fetch_for(stored, tmp_path, 0)
    before = {file.name for file in partial_in(tmp_path).files.values()}
    key = next(iter(SHARDS))
    newer = SHARDS[key][: -(1 << 19)] + bytes(1 << 19)
    put(stored, {key: newer})
    fetch_for(stored, tmp_path, 1)
    (layout,) = partial_in(tmp_path).layouts
    assert layout.ranks == (1,)
    assert_true(tmp_path, {**SHARDS, key: newer})
    after = {file.name for file in partial_in(tmp_path).files.values()}
    assert len(before & after) == 1
    assert left_over(tmp_path) == sorted(after), "what is outdated is gone"
    found, expected = load(str(tmp_path), 1, config), load(MemorySource({**WEIGHTS, key: newer}), 1, config)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(NotFetchedError, match="holds only what rank 1 "):
        load(str(tmp_path), 0, config)


def test_new_metadata_beside_weights_of_some_ranks(stored: ObjectServer, tmp_path: Path) -> None:
    """What ranks need follows from it, so nothing is known of them any more; engines stream."""
    tmp_path /= "m"
    fetch_for(stored, tmp_path, 0, mode="all")
    put(stored, {"config.json": METADATA["config.json"] + b" "})
    done = fetch(URL, tmp_path, options(stored))
    assert (done.mode, done.partial) == ("metadata", None)
    assert left_over(tmp_path) == []


def test_an_outdated_folder_stays_whole_until_there_is_room(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_for(stored, tmp_path, 0)
    put(stored, {key: body[:-1] + b"?" for key, body in SHARDS.items()} | {"x.safetensors": b""})
    real = os.fstatvfs

    def full(descriptor: int) -> os.statvfs_result:
        values = list(real(descriptor))
        values[:8] = [4096, 4096, 1 << 30, 1 << 30, 0, 1000, 1000, 1000]
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "fstatvfs", full)
    with pytest.raises(NoSpaceError, match="in files of an older version"):
        fetch_for(stored, tmp_path, 0, 1, 2)
    assert_loads(tmp_path, 0, options(stored))


def test_space_is_looked_for_by_what_will_be_there(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = nbytes_of(0) + len(WEIGHTS[INDEX])
    free = needed
    real = os.fstatvfs

    def faked(descriptor: int) -> os.statvfs_result:
        values = list(real(descriptor))
        values[:8] = [4096, 4096, 1 << 30, 1 << 30, free // 4096, 1000, 1000, 1000]
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "fstatvfs", faked)
    with pytest.raises(NoSpaceError, match="more are needed"):
        fetch_for(stored, tmp_path, 0)
    free = needed + (256 << 10)
    assert free < sum(map(len, SHARDS.values()))
    fetch_for(stored, tmp_path, 0)
    assert_loads(tmp_path, 0, options(stored))


def test_parts_that_were_cut_or_lost(stored: ObjectServer, tmp_path: Path) -> None:
    config = options(stored)
    fetch_for(stored, tmp_path, 0)
    first, second = (tmp_path / WORK_FOLDER / file.name for file in partial_in(tmp_path).files.values())
    os.truncate(first, 5000)
    assert [problem.partition(" has ")[2] for problem in check(tmp_path)[1]] == [
        f"5000 bytes, not {len(next(iter(SHARDS.values())))}"
    ]
    with pytest.raises(ObjectChangedError, match="has 5000 bytes"):
        load(str(tmp_path), 0, config)
    first.unlink()
    assert "No such file" in check(tmp_path)[1][0]
    with pytest.raises(ObjectNotFoundError, match="not there any more"):
        load(str(tmp_path), 0, config)
    again = fetch_for(stored, tmp_path, 0)
    assert 0 < again.resumed_bytes < nbytes_of(0), "the other one is as it was"
    assert second.exists()
    assert_loads(tmp_path, 0, config)


@pytest.mark.parametrize("damage", ["name", "order", "beyond", "layouts", "kind"])
def test_a_damaged_marker_is_an_error_and_not_an_excuse(stored: ObjectServer, tmp_path: Path, damage: str) -> None:
    fetch_for(stored, tmp_path, 0)
    document = json.loads((tmp_path / PINS_FILE).read_text())
    file = document["partial"]["files"][next(iter(SHARDS))]
    if damage == "name":
        file[0] = "../config.json"
    elif damage == "order":
        file[2][1:1] = [[0, 10]]
    elif damage == "beyond":
        file[2][-1][1] = file[1] + 1
    elif damage == "layouts":
        document["partial"]["layouts"] = []
    else:
        document["partial"] = [1]
    (tmp_path / PINS_FILE).write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"\.s3stream\.json is damaged"):
        open_source(str(tmp_path), StreamConfig())
    assert "not written by this version" in check(tmp_path)[1][0]
    fetch_for(stored, tmp_path, 0)
    assert_true(tmp_path)
    assert_loads(tmp_path, 0, options(stored))


# -- integrity -----------------------------------------------------------------------------------------


def test_loads_that_check_need_whole_blocks(stored: ObjectServer, tmp_path: Path) -> None:
    blocks = 4096
    manifest = asyncio.run(make_manifest(MemorySource(WEIGHTS), StreamConfig(), block_bytes=blocks))
    put(stored, {MANIFEST_KEY: manifest.to_json()})
    checked = options(stored, integrity="manifest")
    fetch_for(stored, tmp_path, 1)
    with pytest.raises(NotFetchedError):
        load(str(tmp_path), 1, checked)
    fetch_for(stored, tmp_path, 1, integrity="manifest")
    assert_loads(tmp_path, 1, checked)
    assert any(layout.blocks for layout in partial_in(tmp_path).layouts)
    with pytest.raises(ConfigError, match="integrity=checksums needs whole files"):
        fetch_for(stored, tmp_path / "new", 1, integrity="checksums")


# -- the command ---------------------------------------------------------------------------------------


def run(*arguments: str | Path, code: int = 0, before: str = "") -> subprocess.CompletedProcess[str]:
    script = f"{before}\nfrom streamer.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_check_inspect_and_verify_say_that_it_is_partial(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3STREAM_ENDPOINT_URL", stored.url)
    folder, ranks = tmp_path / "m", ("--rank", "2", "--tp", "4")
    text = "what rank 2 of engine reference with tp=4 needs"
    assert f"partial: of the weights, only {text}" in run("fetch", URL, folder, "--mode", "all", *ranks).stdout
    asked = stored.counters.connections
    assert f"partial: of the weights, only {text}" in run("fetch", "--check", folder).stdout
    run("fetch", "--check", URL, folder, "--mode", "metadata")
    run("fetch", "--check", URL, folder, "--mode", "all", *ranks)
    for other in ((), ("--rank", "1", "--tp", "4"), ("--rank", "2", "--rank", "3", "--tp", "4"), ("--rank", "0")):
        for mode in ("weights", "all"):
            said = run("fetch", "--check", folder, "--mode", mode, *other, code=1).stdout
            assert "was fetched with mode=all for rank 2 of engine reference with tp=4, not" in said
    assert check(folder, layout=layout_of(2), mode="weights")[1] == []
    assert f"partial: of the weights, it holds only {text}" in run("inspect", folder).stdout
    assert (
        text.removeprefix("what ").removesuffix(" needs")
        == json.loads(run("inspect", folder, "--json").stdout)["partial"]
    )
    for arguments in ((), ("--write",), ("--output", tmp_path / "manifest")):
        assert "is partial: of the weights" in run("verify", folder, *arguments, code=3).stderr
    assert "is partial: of the weights" in run("verify", URL, folder, code=3).stderr  # and is no copy
    assert not list(tmp_path.rglob("*manifest*"))
    assert stored.counters.connections == asked, "none of these needs the network"


def test_mistakes_and_missing_torch(tmp_path: Path) -> None:
    def message(code: int, *arguments: str, before: str = "") -> str:
        return run("fetch", URL, tmp_path, *arguments, code=code, before=before).stderr

    assert "--tp, --pp and --ep are for --rank" in message(2, "--tp", "2")
    assert "add --mode weights or --mode all" in message(2, "--tp", "2", "--rank", "1")
    assert "add --mode weights or --mode all" in message(2, "--rank", "0", "--mode", "metadata")
    assert "there is no rank 2 among 2 (ranks are 0 to 1)" in message(2, "--tp", "2", "--rank", "2", *RANK_OPTIONS[:2])
    assert "there is no engine 'other'" in message(2, "--rank", "0", "--engine", "other", *RANK_OPTIONS[:2])
    no_torch = "import sys; sys.modules['torch'] = None"
    said = message(9, "--rank", "0", *RANK_OPTIONS[:2], before=no_torch)
    assert "needs the package torch (pip install 's3stream[torch]', or fetch without --rank)" in said
    assert not list(tmp_path.iterdir())
