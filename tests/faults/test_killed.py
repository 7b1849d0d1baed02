"""A process that is killed in the middle of a load leaves nothing behind that anybody could mistake for a model."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from streamer.artifacts.metadata import PINS_FILE
from tests.faults.loading import OBJECTS
from tests.servers.object_server import ObjectServer

ROOT = Path(__file__).parent.parent.parent
METADATA = {"config.json": b"{}", "tokenizer.json": b"words " * 60_000, "nested/special.json": b"[]" * 30_000}
#: Per connection, so that pulling and loading take about a second each.
BYTES_PER_SECOND = 600_000.0
KILLS = 4


def start(server: ObjectServer, cache: Path, temporary: Path) -> subprocess.Popen[str]:
    """Start a victim and wait until its imports are done."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.victim", server.url, str(cache)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def shared_memory(process: subprocess.Popen[str]) -> list[str]:
    """Segments that are ours or carry the number of `process`."""
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    return [name for name in names if "s3stream" in name or str(process.pid) in name]


def begun_in(models: Path) -> set[Path]:
    return set(models.glob(".*/"))


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def check_complete(folder: Path) -> None:
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found.pop(PINS_FILE)
    assert found == {**METADATA, "model.safetensors.index.json": OBJECTS["model.safetensors.index.json"]}


def test_a_killed_load_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    rng = random.Random(5)
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    models = cache / "models"
    unfinished = published = 0
    with ObjectServer(bytes_per_second=BYTES_PER_SECOND) as server:
        for key, content in {**OBJECTS, **METADATA}.items():
            server.put("bucket", f"m/{key}", content)
        process = start(server, cache, temporary)
        began = time.monotonic()
        out, err = process.communicate(timeout=60)
        seconds = time.monotonic() - began
        assert process.returncode == 0, err
        folder = Path(out.strip())
        check_complete(folder)
        for number in range(KILLS):
            shutil.rmtree(folder, ignore_errors=True)
            left = begun_in(models)
            process = start(server, cache, temporary)
            if number % 2 == 0:  # while it pulls, half a second long; else anywhere
                wait_until(lambda left=left: bool(begun_in(models) - left))  # type: ignore[misc]
            time.sleep(rng.random() * (0.4 if number % 2 == 0 else seconds))
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
            for found in models.glob("[!.]*"):
                check_complete(found)
                published += 1
            unfinished += len(begun_in(models))
            # Torch makes itself a folder for compiled code, whatever is done with it.
            assert not [path for path in temporary.iterdir() if not path.name.startswith("torch")]
            assert not shared_memory(process)
        assert unfinished, "no process was killed while it pulled"
        assert published < KILLS
        shutil.rmtree(folder, ignore_errors=True)
        process = start(server, cache, temporary)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert Path(out.strip()) == folder
        check_complete(folder)
        # What the killed ones had begun is gone as well; the lock protects nothing and stays.
        assert [path.name for path in models.iterdir() if path != folder] == [f".{folder.name}.lock"]
        assert not shared_memory(process)
