"""What a fetch brings into a folder, what it leaves alone, and what it refuses."""

from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest
import torch

import streamer
from streamer.artifacts.check import check
from streamer.artifacts.destination import WORK_FOLDER, Destination
from streamer.artifacts.digests import make_manifest
from streamer.artifacts.fetch import fetch
from streamer.artifacts.metadata import PINS_FILE, Mode, read_marker, read_pins
from streamer.checkpoint.manifest import MANIFEST_KEY
from streamer.config import StreamConfig
from streamer.errors import (
    CheckpointError,
    ConfigError,
    DestinationError,
    IntegrityError,
    NoSpaceError,
    ObjectChangedError,
    ObjectNotFoundError,
)
from streamer.sources.memory import MemorySource
from streamer.sources.open import open_source
from streamer.sources.pinned import PinnedSource
from tests.artifacts.fetching import (
    ALL,
    METADATA,
    OTHERS,
    TENSORS,
    URL,
    WEIGHTS,
    config_for,
    left_over,
    put_all,
    tree,
)
from tests.servers.checksums import keep
from tests.servers.object_server import Fault, ObjectServer, Request, Response


@pytest.fixture
def stored(server: ObjectServer) -> ObjectServer:
    put_all(server)
    return server


def is_complete(folder: Path) -> bool:
    return not check(folder)[1]


# -- what is brought ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "files"), [("metadata", METADATA), ("weights", WEIGHTS), ("all", ALL)])
def test_modes(stored: ObjectServer, tmp_path: Path, mode: Mode, files: dict[str, bytes]) -> None:
    fetched = fetch(URL, tmp_path / "m", config_for(stored), mode=mode)
    assert tree(tmp_path / "m") == files
    assert (fetched.files, fetched.nbytes) == (len(files), sum(map(len, files.values())))
    assert (fetched.skipped, fetched.resumed_bytes, fetched.fetched_bytes) == (0, 0, fetched.nbytes)
    assert left_over(tmp_path / "m") == []
    marker = read_marker(tmp_path / "m")
    assert marker is not None
    assert marker.mode == fetched.mode == mode
    assert sorted(marker.here) == sorted(files)
    assert {item.key for item in marker.items} == {*ALL, *OTHERS}
    assert is_complete(tmp_path / "m")


def test_weights_come_with_what_says_what_they_are(stored: ObjectServer, tmp_path: Path) -> None:
    """An index that names two of three shards: only these are loaded, so only these are fetched."""
    first, second, _ = WEIGHTS
    index = json.dumps({"weight_map": {"layer.0": first, "layer.1": second}}).encode()
    stored.put("models", "org/m/model.safetensors.index.json", index)
    stored.put("models", f"org/m/{MANIFEST_KEY}", b"digests")
    fetch(URL, tmp_path, config_for(stored), mode="weights")
    expected = {first: WEIGHTS[first], second: WEIGHTS[second], MANIFEST_KEY: b"digests"}
    assert tree(tmp_path) == {**expected, "model.safetensors.index.json": index}


def test_a_fetched_folder_loads_as_it_was_stored(stored: ObjectServer, tmp_path: Path) -> None:
    fetch(URL, tmp_path, config_for(stored), mode="all")
    model = torch.nn.Module()
    for name, tensor in TENSORS.items():
        model.register_buffer(name.replace(".", "_"), torch.zeros_like(tensor))
    loaded = dict(streamer.iterate(str(tmp_path)))
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert read_pins(tmp_path) is None, "an engine must load what is here"


def test_a_folder_with_metadata_alone_says_where_its_weights_are(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored)
    fetch(URL, tmp_path, config)
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        dict(streamer.iterate(str(tmp_path)))
    pins = read_pins(tmp_path)
    assert pins is not None
    assert all(key in {item.key for item in pins.items} for key in WEIGHTS)
    loaded = dict(streamer.iterate(PinnedSource(open_source(pins.url, config), pins.items), config))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    stored.put("models", f"org/m/{next(iter(WEIGHTS))}", next(iter(WEIGHTS.values()))[:-1] + b"x")
    with pytest.raises(ObjectChangedError):
        dict(streamer.iterate(PinnedSource(open_source(pins.url, config), pins.items), config))


def test_local_folders_can_be_fetched_from_even_if_they_were_fetched(stored: ObjectServer, tmp_path: Path) -> None:
    fetch(URL, tmp_path / "a", config_for(stored), mode="all")
    fetch(str(tmp_path / "a"), tmp_path / "b", config_for(stored), mode="all")
    assert tree(tmp_path / "b") == ALL
    with pytest.raises(ConfigError, match="are the same folder"):
        fetch(str(tmp_path / "a"), tmp_path / "a" / ".." / "a", config_for(stored))


def test_everybody_may_read_whatever_the_umask(stored: ObjectServer, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        fetch(URL, tmp_path / "made" / "m", config_for(stored))
    finally:
        os.umask(before)
    for path in [tmp_path / "made", *(tmp_path / "made").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644), path
    fetch(URL, tmp_path / "group", config_for(stored))
    assert stat.S_IMODE((tmp_path / "group" / "1_Pooling").stat().st_mode) == 0o777 & ~before | 0o555


# -- again -------------------------------------------------------------------------------------------


def test_what_is_complete_costs_one_listing(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored)
    fetch(URL, tmp_path, config, mode="all")
    before = stored.counters.requests.copy()
    again = fetch(f"{URL}/", tmp_path, config, mode="all")
    assert stored.counters.requests - before == {"LIST": 1}
    assert (again.files, again.skipped, again.fetched_bytes) == (len(ALL), len(ALL), 0)


def test_modes_add_up_and_nothing_is_fetched_twice(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored)
    fetch(URL, tmp_path, config)
    added = fetch(URL, tmp_path, config, mode="weights")
    assert (added.mode, added.skipped) == ("all", len(METADATA))
    assert added.fetched_bytes == sum(map(len, WEIGHTS.values()))
    less = fetch(URL, tmp_path, config, mode="metadata")
    assert (less.mode, less.fetched_bytes, less.removed) == ("all", 0, ())
    assert tree(tmp_path) == ALL


def test_a_new_version_replaces_what_changed_and_removes_what_is_gone(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored)
    fetch(URL, tmp_path, config, mode="all")
    (tmp_path / "notes.txt").write_text("a foreign file")
    (tmp_path / "1_Pooling" / "mine").write_text("another")
    stored.put("models", "org/m/tokenizer.json", METADATA["tokenizer.json"].upper())
    for key in ("merges.txt", "1_Pooling/config.json"):
        del stored.objects["models"][f"org/m/{key}"]
    stored.put("models", "org/m/deep/er/new.json", b"[]")
    again = fetch(URL, tmp_path, config, mode="all")
    expected = {**ALL, "tokenizer.json": METADATA["tokenizer.json"].upper(), "deep/er/new.json": b"[]"}
    expected |= {"notes.txt": b"a foreign file", "1_Pooling/mine": b"another"}
    del expected["merges.txt"], expected["1_Pooling/config.json"]
    assert tree(tmp_path) == expected
    assert again.removed == ("1_Pooling/config.json", "merges.txt")
    assert again.fetched_bytes == len(expected["tokenizer.json"]) + 2
    del stored.objects["models"]["org/m/deep/er/new.json"]
    fetch(URL, tmp_path, config, mode="all")
    assert not (tmp_path / "deep").exists(), "nobody else uses these folders"


def test_weights_of_an_older_version_do_not_stay_beside_new_metadata(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored)
    fetch(URL, tmp_path, config, mode="all")
    stored.put("models", f"org/m/{next(iter(WEIGHTS))}", next(iter(WEIGHTS.values()))[:-1] + b"x")
    again = fetch(URL, tmp_path, config)
    assert tree(tmp_path) == METADATA
    assert again.removed == tuple(WEIGHTS)
    assert read_pins(tmp_path) is not None


def test_another_source_takes_the_folder_over(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored)
    fetch(URL, tmp_path, config)
    stored.put("models", "org/other/config.json", METADATA["config.json"])
    fetched = fetch("s3://models/org/other", tmp_path, config)
    assert tree(tmp_path) == {"config.json": b"{}"}
    assert fetched.skipped == 0, "what another source calls the same need not be the same"


def test_files_that_were_cut_or_lost_are_fetched_again(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored)
    fetch(URL, tmp_path, config)
    (tmp_path / "config.json").unlink()
    os.truncate(tmp_path / "tokenizer.json", 5)
    assert len(check(tmp_path)[1]) == 2
    again = fetch(URL, tmp_path, config)
    assert tree(tmp_path) == METADATA
    assert again.skipped == len(METADATA) - 2


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 3}'])
def test_a_marker_that_nobody_can_read_counts_for_nothing(stored: ObjectServer, tmp_path: Path, text: str) -> None:
    config = config_for(stored)
    said: list[str] = []
    fetch(URL, tmp_path, config)
    (tmp_path / PINS_FILE).write_text(text)
    assert not is_complete(tmp_path)
    assert fetch(URL, tmp_path, config, note=said.append).skipped == 0
    assert "not written by this version" in said[0]
    assert is_complete(tmp_path)


def test_objects_without_etags_are_fetched_every_time(stored: ObjectServer, tmp_path: Path) -> None:
    for stored_object in stored.objects["models"].values():
        stored_object.etag = "W/" + stored_object.etag
    for _ in range(2):
        with pytest.warns(UserWarning, match="no strong ETags"):
            assert fetch(URL, tmp_path, config_for(stored)).skipped == 0
    assert tree(tmp_path) == METADATA
    assert left_over(tmp_path) == []


# -- while the store changes -------------------------------------------------------------------------


def test_an_object_that_changes_meanwhile_stops_the_fetch_and_starts_anew(stored: ObjectServer, tmp_path: Path) -> None:
    key = next(iter(WEIGHTS))
    config = config_for(stored, concurrency=2)
    newer = WEIGHTS[key][:-100_000] + bytes(100_000)

    def replace(request: Request, response: Response) -> Response:
        stored.put("models", request.key, newer)
        return stored.route(request)

    stored.faults = [Fault(replace, key=f"org/m/{key}", method="GET", skip=10)]
    with pytest.raises(ObjectChangedError):
        fetch(URL, tmp_path, config, mode="all")
    assert not is_complete(tmp_path)
    assert key not in tree(tmp_path)
    again = fetch(URL, tmp_path, config, mode="all")
    assert tree(tmp_path) == {**ALL, key: newer}
    assert again.fetched_bytes >= len(newer), "nothing of the older version was of use"
    assert again.skipped == len(METADATA)
    assert left_over(tmp_path) == []


def test_an_older_version_that_comes_back_is_not_taken_for_the_newer_one(stored: ObjectServer, tmp_path: Path) -> None:
    """Both have one size, and the fetch of the newer one fails after it was given its name."""
    config, key = config_for(stored, concurrency=1), "tokenizer.json"
    older, newer = METADATA[key], METADATA[key].upper()
    fetch(URL, tmp_path, config)

    def gone(request: Request, response: Response) -> Response:
        request.headers["if-match"] = '"another"'
        return stored.route(request)

    stored.put("models", f"org/m/{key}", newer)
    stored.put("models", "org/m/zz.json", b"[1]")
    stored.faults = [Fault(gone, key="org/m/zz.json", method="GET", times=None)]
    with pytest.raises(ObjectChangedError):
        fetch(URL, tmp_path, config)
    assert (tmp_path / key).read_bytes() == newer
    stored.put("models", f"org/m/{key}", older)
    stored.faults = []
    fetch(URL, tmp_path, config)
    assert (tmp_path / key).read_bytes() == older


def test_what_was_about_to_get_its_name_is_not_taken_to_have_it(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is recorded first. What somebody else has put there has the same size."""
    config, key = config_for(stored, concurrency=1), "tokenizer.json"
    foreign = METADATA[key].upper()
    (tmp_path / key).write_bytes(foreign)
    publish = Destination.publish

    def fail(self: Destination, part: str, name: str) -> None:
        if name == key:
            raise DestinationError("killed just before")
        publish(self, part, name)

    with monkeypatch.context() as patch, pytest.raises(DestinationError, match="killed"):
        patch.setattr(Destination, "publish", fail)
        fetch(URL, tmp_path, config)
    assert (tmp_path / key).read_bytes() == foreign
    before = stored.counters.requests["GET"]
    again = fetch(URL, tmp_path, config)
    assert tree(tmp_path) == METADATA
    assert again.resumed_bytes == len(METADATA[key])
    assert stored.counters.requests["GET"] == before


@pytest.mark.parametrize("key", ["../precious", "/precious", "a/../../precious"])
def test_a_marker_cannot_have_anything_outside_removed(stored: ObjectServer, tmp_path: Path, key: str) -> None:
    fetch(URL, tmp_path / "m", config_for(stored))
    marker = json.loads((tmp_path / "m" / PINS_FILE).read_text())
    (tmp_path / "m" / PINS_FILE).write_text(json.dumps({**marker, "url": "s3://other/", "here": [key]}))
    (tmp_path / "precious").touch()
    with pytest.raises(DestinationError, match="is no path inside"):
        fetch(URL, tmp_path / "m", config_for(stored))
    assert (tmp_path / "precious").exists()


def test_while_files_are_replaced_the_folder_is_not_complete(stored: ObjectServer, tmp_path: Path) -> None:
    config = config_for(stored)
    fetch(URL, tmp_path, config)
    seen = []

    def look(request: Request, response: Response) -> None:
        seen.append(is_complete(tmp_path))

    stored.faults = [Fault(look, method="GET", times=None)]
    fetch(URL, tmp_path, config, mode="all")
    assert set(seen) == {True}, "weights that are added replace nothing"
    seen.clear()
    stored.put("models", "org/m/config.json", b"[]")
    fetch(URL, tmp_path, config, mode="all")
    assert set(seen) == {False}


# -- what is refused ---------------------------------------------------------------------------------


def test_an_empty_prefix_is_an_error(stored: ObjectServer, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match="there are no objects here"):
        fetch("s3://models/org/none", tmp_path, config_for(stored))
    assert not is_complete(tmp_path)


def test_a_sibling_whose_name_begins_alike_stays_where_it_is(stored: ObjectServer, tmp_path: Path) -> None:
    stored.put("models", "org/m-v2/config.json", b"other")
    fetch(URL, tmp_path, config_for(stored))
    assert tree(tmp_path) == METADATA


def test_a_source_without_what_is_asked_for(stored: ObjectServer, tmp_path: Path) -> None:
    stored.put("models", "org/w/model.safetensors", b"w")
    with pytest.raises(CheckpointError, match="nothing but weights"):
        fetch("s3://models/org/w", tmp_path / "w", config_for(stored))
    stored.put("models", "org/t/tokenizer.json", b"{}")
    with pytest.raises(CheckpointError, match="no safetensors files"):
        fetch("s3://models/org/t", tmp_path / "t", config_for(stored), mode="all")
    fetch("s3://models/org/t", tmp_path / "t", config_for(stored))
    assert tree(tmp_path / "t") == {"tokenizer.json": b"{}"}


@pytest.mark.parametrize("key", ["../escape.json", "a/../../escape.json", "a//b.json", "/abs/x.json", "./x.json"])
def test_keys_that_would_leave_the_folder_are_refused(stored: ObjectServer, tmp_path: Path, key: str) -> None:
    stored.put("models", f"org/m/{key}", b"evil")
    with pytest.raises(CheckpointError, match="no path inside a folder"):
        fetch(URL, tmp_path / "m", config_for(stored))
    assert tree(tmp_path / "m") == {}
    assert not (tmp_path / "escape.json").exists()


def test_a_key_that_is_file_and_folder_is_refused(stored: ObjectServer, tmp_path: Path) -> None:
    stored.put("models", "org/m/config.json/x.json", b"{}")
    with pytest.raises(CheckpointError, match="a file and a folder of one name"):
        fetch(URL, tmp_path, config_for(stored))


def test_links_in_the_folder_are_not_followed(stored: ObjectServer, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "m"
    outside.mkdir()
    folder.mkdir()
    (outside / "config.json").write_text("precious")
    (folder / "1_Pooling").symlink_to(outside)
    with pytest.raises(DestinationError, match=r"1_Pooling/config\.json.*link"):
        fetch(URL, folder, config_for(stored))
    (folder / "1_Pooling").unlink()
    (folder / "config.json").symlink_to(outside / "config.json")
    with pytest.raises(DestinationError, match=r"config\.json is a symbolic link"):
        fetch(URL, folder, config_for(stored))
    (folder / "config.json").unlink()
    shutil.rmtree(folder / WORK_FOLDER)
    (folder / WORK_FOLDER).symlink_to(outside)
    with pytest.raises(DestinationError, match="link"):
        fetch(URL, folder, config_for(stored))
    assert (outside / "config.json").read_text() == "precious"
    assert [path.name for path in outside.iterdir()] == ["config.json"]
    (folder / WORK_FOLDER).unlink()
    link = tmp_path / "link"
    link.symlink_to(folder)  # the folder itself is whoever runs us's to name
    fetch(URL, link, config_for(stored))
    assert tree(folder) == METADATA


def test_a_folder_in_the_place_of_a_file(stored: ObjectServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(DestinationError, match=r"config\.json is no file"):
        fetch(URL, tmp_path, config_for(stored))
    with pytest.raises(DestinationError, match=r"cannot use the folder .*tokenizer\.json/x"):
        (tmp_path / "tokenizer.json").touch()
        fetch(URL, tmp_path / "tokenizer.json" / "x", config_for(stored))


def test_more_than_is_allowed_is_refused_before_it_is_fetched(stored: ObjectServer, tmp_path: Path) -> None:
    nbytes = sum(map(len, METADATA.values()))
    with pytest.raises(NoSpaceError, match=f"has {nbytes} bytes to fetch, and {nbytes - 1} are allowed"):
        fetch(URL, tmp_path, config_for(stored), max_bytes=nbytes - 1)
    assert not stored.counters.requests["GET"]
    fetch(URL, tmp_path, config_for(stored), max_bytes=nbytes)


# -- integrity ---------------------------------------------------------------------------------------


def put_manifest(server: ObjectServer) -> None:
    source = MemorySource(ALL)
    server.put("models", f"org/m/{MANIFEST_KEY}", asyncio.run(make_manifest(source, StreamConfig())).to_json())


@pytest.mark.parametrize("key", ["tokenizer.json", "2_Dense/model.safetensors", next(iter(WEIGHTS))])
def test_bytes_that_the_manifest_contradicts_get_no_name(stored: ObjectServer, tmp_path: Path, key: str) -> None:
    put_manifest(stored)
    config = config_for(stored, integrity="manifest", concurrency=1)
    stored.put("models", f"org/m/{key}", ALL[key][:-1] + b"?")
    with pytest.raises(IntegrityError, match="not those that the manifest was made of"):
        fetch(URL, tmp_path, config, mode="all")
    assert key not in tree(tmp_path)
    stored.put("models", f"org/m/{key}", ALL[key])
    fetch(URL, tmp_path, config, mode="all")
    assert {name: body for name, body in tree(tmp_path).items() if name != MANIFEST_KEY} == ALL
    assert len(dict(streamer.iterate(str(tmp_path), {"integrity": "manifest"}))) == len(TENSORS)


def test_bytes_that_a_stored_checksum_contradicts_get_no_name(stored: ObjectServer, tmp_path: Path) -> None:
    key, *rest = WEIGHTS
    for name in ALL:
        if name.endswith(".safetensors"):
            stored.checksums["models", f"org/m/{name}"] = keep("CRC32", ALL[name] if name != key else b"other")
    config = config_for(stored, integrity="checksums", concurrency=1)
    with pytest.raises(IntegrityError, match="the store keeps"):
        fetch(URL, tmp_path, config, mode="all")
    assert key not in tree(tmp_path)
    stored.checksums["models", f"org/m/{key}"] = keep("CRC32", WEIGHTS[key])
    stored.checksums.pop(("models", f"org/m/{rest[0]}"))
    with pytest.warns(UserWarning, match="1 of 3 files will not be checked"):
        fetched = fetch(URL, tmp_path, config, mode="all")
    assert tree(tmp_path) == ALL
    assert fetched.checksums is not None
    assert fetched.checksums.checked_files == 2


# -- several at once ---------------------------------------------------------------------------------


def _fetch(url: str, folder: str, options: dict[str, object], mode: Mode) -> int:
    return fetch(url, Path(folder), StreamConfig.resolve(options), mode=mode).fetched_bytes


def test_processes_side_by_side_fetch_once(tmp_path: Path) -> None:
    with ObjectServer(bytes_per_second=2e6) as server:
        put_all(server)
        options = {"endpoint_url": server.url, "request_bytes": "64KiB", "hedge": False}
        with multiprocessing.get_context("spawn").Pool(4) as pool:
            fetched = pool.starmap(_fetch, [(URL, str(tmp_path), options, "all")] * 4)
        total = sum(map(len, ALL.values()))
        assert sorted(fetched) == [0, 0, 0, total]
        assert server.counters.body_bytes == pytest.approx(total, rel=0.01), "and the listings"
    assert tree(tmp_path) == ALL


def test_without_locks_the_result_is_right_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fetches all of it under names of its own, and renaming is atomic."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("fcntl.flock", no_locks)
    said: list[str] = []
    outcomes: list[str] = []

    def run(server: ObjectServer, seconds: float, folder: Path) -> None:
        threading.Event().wait(seconds)
        try:
            fetch(URL, folder, config_for(server, concurrency=4), mode="all", note=said.append)
            outcomes.append("done")
        except DestinationError as error:
            outcomes.append(str(error))

    with ObjectServer(bytes_per_second=6e6) as server:
        put_all(server)
        for number in range(6):
            # The first three begin with nothing, the others with an older version.
            folder = tmp_path / str(number % 3)
            newer = {**ALL, "config.json": b"[%d]" % number, next(iter(WEIGHTS)): b"w" * (200_000 + number // 3)}
            for key, body in newer.items():
                server.put("models", f"org/m/{key}", body)
            threads = [
                threading.Thread(target=run, args=(server, delay * (number % 3) * 0.1, folder)) for delay in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            before = server.counters.requests.copy()
            fetch(URL, folder, config_for(server), mode="all")
            assert is_complete(folder)
            assert tree(folder) == newer
            if number < 3:
                assert server.counters.requests - before == {"LIST": 1}
    assert outcomes[:9] == ["done"] * 9
    # One may remove as outdated what another has just renamed; that one says so.
    assert all(outcome == "done" or "run the same command again" in outcome for outcome in outcomes[9:])
    assert "has no locks" in said[0]
