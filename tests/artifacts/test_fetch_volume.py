"""Volumes that have too little, say no, or do so in the middle; and memory, which does not grow with the model."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamer.artifacts.check import check
from streamer.artifacts.destination import WORK_FOLDER, Destination
from streamer.artifacts.fetch import fetch
from streamer.artifacts.journal import Journal
from streamer.cli.exit_codes import exit_code
from streamer.errors import DestinationError, NoSpaceError
from tests.artifacts.fetching import ALL, METADATA, ROOT, URL, WEIGHTS, config_for, put_all, start, tree
from tests.servers.object_server import Fault, ObjectServer, Request, Response

TOTAL = sum(map(len, ALL.values()))


@pytest.fixture
def stored(server: ObjectServer) -> ObjectServer:
    put_all(server)
    return server


def _fail_after(monkeypatch: pytest.MonkeyPatch, name: str, times: int, number: int) -> None:
    """Let a call of the kernel fail from some point on."""
    original, left = getattr(os, name), [times]

    def call(*arguments: object, **options: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(
    ("number", "kind", "code", "hint"),
    [
        (errno.ENOSPC, NoSpaceError, 11, "make room on the volume"),
        (errno.EDQUOT, NoSpaceError, 11, "raise the quota"),
        (errno.EROFS, DestinationError, 10, "mount the volume for writing"),
        (errno.EACCES, DestinationError, 10, "run as a user who may write there"),
        (errno.EIO, DestinationError, 10, "look at the volume"),
    ],
)
def test_a_volume_that_fails_in_the_middle_keeps_what_it_has(
    stored: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[DestinationError],
    code: int,
    hint: str,
) -> None:
    config = config_for(stored, concurrency=4)
    with monkeypatch.context() as patch, pytest.raises(kind, match=hint) as caught:
        _fail_after(patch, "pwrite", 40, number)
        fetch(URL, tmp_path, config, mode="all")
    assert exit_code(caught.value) == code
    assert f"cannot write {tmp_path}/model-0000" in str(caught.value)
    assert check(tmp_path)[1]
    done = fetch(URL, tmp_path, config, mode="all")
    assert tree(tmp_path) == ALL
    kept = sum(len(body) for body in METADATA.values()) + 30 * 65536
    assert done.fetched_bytes <= TOTAL - kept


@pytest.mark.parametrize("call", ["fdatasync", "fsync", "ftruncate", "rename", "open"])
def test_whatever_call_fails_the_next_fetch_is_right(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    config = config_for(stored, concurrency=4)
    for times in (0, 1, 2):
        with monkeypatch.context() as patch, pytest.raises(NoSpaceError):
            _fail_after(patch, call, times, errno.ENOSPC)
            fetch(URL, tmp_path / call, config, mode="all")
        if (tmp_path / call).exists():
            assert check(tmp_path / call)[1]
            assert all(body == ALL[key] for key, body in tree(tmp_path / call).items())
    fetch(URL, tmp_path / call, config, mode="all")
    assert tree(tmp_path / call) == ALL


def test_nothing_is_recorded_or_named_before_it_is_on_disk(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure cannot be had here, so the order of calls is looked at."""
    dirty: dict[int, set[int]] = {}  # by inode, where ranges begin that were written and not synced
    parts: dict[str, int] = {}
    recorded = renamed = 0
    real: dict[str, Any] = {name: getattr(os, name) for name in ("pwrite", "fdatasync", "fsync", "rename")}
    add_spans, add_finished = Journal.add_spans, Journal.add_finished

    def inode_of(descriptor: int) -> int:
        return os.fstat(descriptor).st_ino

    def pwrite(descriptor: int, body: memoryview, start: int) -> int:
        count: int = real["pwrite"](descriptor, body, start)
        dirty.setdefault(inode_of(descriptor), set()).add(start)
        return count

    def sync(name: str) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            before = set(dirty.get(inode_of(descriptor), ()))
            real[name](descriptor)
            dirty.get(inode_of(descriptor), set()).difference_update(before)

        return call

    def spans(journal: Journal, part: str, found: Sequence[tuple[int, int]]) -> None:
        nonlocal recorded
        recorded += len(found)
        inode = (tmp_path / WORK_FOLDER / part).stat().st_ino
        assert not dirty.get(inode, set()) & {start for start, _ in found}
        add_spans(journal, part, found)

    def finished(journal: Journal, part: str, key: str, inode: int) -> None:
        assert not dirty.get(inode)
        parts[part] = inode
        add_finished(journal, part, key, inode)

    def rename(source: str, target: str, **folders: int) -> None:
        nonlocal renamed
        if source.endswith(".part"):
            assert source in parts, "it is recorded first"
            renamed += 1
        else:
            assert renamed == len(ALL), "the marker is last"
        real["rename"](source, target, **folders)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", sync("fdatasync"))
    monkeypatch.setattr(os, "fsync", sync("fsync"))
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(Journal, "add_spans", spans)
    monkeypatch.setattr(Journal, "add_finished", finished)
    fetch(URL, tmp_path, config_for(stored, concurrency=4), mode="all")
    assert recorded
    assert tree(tmp_path) == ALL


@pytest.mark.parametrize("seconds", [0.02, 0.5])
def test_after_a_sync_has_failed_nothing_of_the_file_is_recorded(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Of what is written to it meanwhile, some or all, too."""
    failed: list[str] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".part") and not failed:
            failed.append(Path(path).name)
            time.sleep(seconds)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    config = config_for(stored, concurrency=4)
    with (
        monkeypatch.context() as patch,
        pytest.raises(DestinationError, match=r"Input/output error|could not be synced"),
    ):
        patch.setattr(os, "fdatasync", fdatasync)
        fetch(URL, tmp_path, config, mode="all")
    with Destination(tmp_path) as destination, Journal(destination) as journal:
        assert journal.arrived(failed[0]).nbytes == 0
        assert failed[0] in destination.parts(), "nor has it got its name"
        assert failed[0] not in {part for parts in journal.finished.values() for part in parts.values()}
    fetch(URL, tmp_path, config, mode="all")
    assert tree(tmp_path) == ALL


# -- before the first byte ---------------------------------------------------------------------------


def _statvfs(monkeypatch: pytest.MonkeyPatch, *, nbytes: int, inodes: int = 1000, all_inodes: int = 1000) -> None:
    real = os.fstatvfs

    def faked(descriptor: int) -> os.statvfs_result:
        values = list(real(descriptor))
        values[:8] = [4096, 4096, 1 << 30, 1 << 30, nbytes // 4096, all_inodes, inodes, inodes]
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "fstatvfs", faked)


def test_room_is_looked_for_before_anything_is_fetched(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(stored)
    _statvfs(monkeypatch, nbytes=4_096_000)
    with pytest.raises(NoSpaceError, match=r"has 4096000 bytes free, and 51\d{5} more are needed for 9 files"):
        fetch(URL, tmp_path, config, mode="all")
    assert not stored.counters.requests["GET"]
    fetch(URL, tmp_path, config)
    _statvfs(monkeypatch, nbytes=1 << 30, inodes=5)
    with pytest.raises(NoSpaceError, match="has 5 inodes free, and 6 are needed for 3 files"):
        fetch(URL, tmp_path, config, mode="all")
    _statvfs(monkeypatch, nbytes=1 << 30, inodes=0, all_inodes=0)  # Btrfs and NFS count none
    fetch(URL, tmp_path, config, mode="all")
    assert tree(tmp_path) == ALL


def test_what_is_there_already_needs_no_room(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(stored, concurrency=1)
    with monkeypatch.context() as patch, pytest.raises(NoSpaceError):
        _fail_after(patch, "pwrite", 60, errno.ENOSPC)
        fetch(URL, tmp_path, config, mode="all")
    _statvfs(monkeypatch, nbytes=TOTAL - 45 * 65536)
    assert fetch(URL, tmp_path, config, mode="all").resumed_bytes > 0
    assert tree(tmp_path) == ALL


def test_an_older_version_makes_room_and_never_lies_beside_the_newer(
    stored: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(stored, concurrency=2)
    fetch(URL, tmp_path, config, mode="all")
    newer = {key: body[:-1] + b"?" for key, body in WEIGHTS.items()}
    for key, body in newer.items():
        stored.put("models", f"org/m/{key}", body)
    stored.put("models", "org/m/tokenizer.model", bytes(6_000_000))
    _statvfs(monkeypatch, nbytes=16384)
    with pytest.raises(NoSpaceError, match=r"bytes free and \d+ in files of an older version"):
        fetch(URL, tmp_path, config, mode="all")
    assert tree(tmp_path) == ALL, "nothing was lost for nothing"
    assert not check(tmp_path)[1]
    del stored.objects["models"]["org/m/tokenizer.model"]
    seen: list[bool] = []

    def look(request: Request, response: Response) -> None:
        seen.extend(body == newer[key] for key, body in tree(tmp_path).items() if key in WEIGHTS)

    stored.faults = [Fault(look, key="org/m/", method="GET", times=None)]
    _statvfs(monkeypatch, nbytes=1_000_000)
    fetch(URL, tmp_path, config, mode="all")
    assert tree(tmp_path) == {**ALL, **newer}
    assert seen
    assert all(seen)


# -- real ones ---------------------------------------------------------------------------------------


def _may_mount() -> bool:
    mount = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return not subprocess.run(mount, capture_output=True).returncode


@pytest.mark.skipif(not _may_mount(), reason="the kernel lets us mount nothing")
@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("size=3m", 11, "bytes free, and"),
        ("size=64m,nr_inodes=6", 11, "inodes free, and"),
        ("size=64m,ro", 10, "mount the volume for writing"),
        ("size=64m", 0, ""),
    ],
)
def test_small_and_read_only_volumes(stored: ObjectServer, tmp_path: Path, options: str, code: int, said: str) -> None:
    script = f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"'
    process = start(stored, tmp_path, "--mode", "all", before=("unshare", "-rm", "sh", "-c", script, str(tmp_path)))
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert said in err
    assert "Traceback" not in err


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user reaches; that of pytest, only we do."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_of_somebody_else(stored: ObjectServer, reachable: Path) -> None:
    folder = reachable / "m"
    folder.mkdir()
    folder.chmod(0o555)
    user = os.geteuid()
    os.seteuid(user or 65534)  # nothing is denied to root
    try:
        with pytest.raises(DestinationError, match="Permission denied.*run as a user who may write there, or set fsG"):
            fetch(URL, folder, config_for(stored))
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


# -- memory ------------------------------------------------------------------------------------------

MEASURE = """
import json, sys
from pathlib import Path
from streamer.artifacts.destination import WORK_FOLDER, Destination
from streamer.artifacts.fetch import fetch
from streamer.artifacts.journal import Journal
from streamer.config import StreamConfig

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

url, folder = sys.argv[1:]
config = StreamConfig.resolve({"endpoint_url": url, "buffer_bytes": "64MiB", "concurrency": 32})
fetch("s3://models/small", Path(folder, "small"), config)
before = peak()
fetched = fetch("s3://models/large", Path(folder, "large"), config, mode="weights")
print(json.dumps({"bytes": fetched.fetched_bytes, "grown": peak() - before, "torch": "torch" in sys.modules}))
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    large = tmp_path / "model.safetensors"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    with ObjectServer() as server:
        server.put("models", "small/config.json", b"{}")
        server.put_file("models", "large/model.safetensors", large)
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, server.url, str(tmp_path / "out")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["bytes"] == 1 << 30
    assert not measured["torch"]
    # One buffer per read in flight, of which there are eight.
    assert 32 << 20 < measured["grown"] < (64 << 20) + (24 << 20), measured
    shutil.rmtree(tmp_path / "out")
