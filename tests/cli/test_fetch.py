"""``s3stream fetch``, run as an init container and its probes run it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.artifacts.fetching import ALL, METADATA, ROOT, URL, WEIGHTS, put_all, tree
from tests.servers.object_server import Fault, ObjectServer, error_response

COMMAND = [str(Path(sys.executable).parent / "s3stream"), "fetch"]
SCRIPTED = [sys.executable, "-c", "from streamer.cli import main; main()", "fetch"]


def run(*arguments: str | Path, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*SCRIPTED, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environ},
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def stored(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    put_all(server)
    monkeypatch.setenv("S3STREAM_ENDPOINT_URL", server.url)
    return server


def test_metadata_is_the_default_and_a_second_run_skips_it(stored: ObjectServer, tmp_path: Path) -> None:
    nbytes = sum(map(len, METADATA.values()))
    text = run(URL, tmp_path).stdout
    size = f"{nbytes / 1000:.2f} kB"
    assert text == f"{tmp_path}: {len(METADATA)} files, {size}, mode=metadata; fetched {size}\n"
    assert tree(tmp_path) == METADATA
    document = json.loads(run(URL, tmp_path, "--json").stdout)
    assert {key: document[key] for key in ("files", "bytes", "skipped", "resumed_bytes", "fetched_bytes")} == {
        "files": len(METADATA),
        "bytes": nbytes,
        "skipped": len(METADATA),
        "resumed_bytes": 0,
        "fetched_bytes": 0,
    }
    (source,) = document["sources"]
    assert (source["url"], source["folder"], source["mode"]) == (f"{URL}/", str(tmp_path), "metadata")


def test_pairs_as_kserve_gives_them(stored: ObjectServer, tmp_path: Path) -> None:
    """One container for several models; and a scheme of our own, which a ClusterStorageContainer can claim."""
    stored.put("models", "lora/adapter_config.json", b"{}")
    stored.put("models", "lora/adapter_model.safetensors", b"adapter")
    own = URL.replace("s3://", "s3stream://")
    document = json.loads(
        run(own, tmp_path / "a", "s3://models/lora", tmp_path / "b", "--mode", "all", "--json").stdout
    )
    assert tree(tmp_path / "a") == ALL
    assert tree(tmp_path / "b") == {"adapter_config.json": b"{}", "adapter_model.safetensors": b"adapter"}
    assert document["files"] == len(ALL) + 2
    assert [source["files"] for source in document["sources"]] == [len(ALL), 2]
    run("--check", own, tmp_path / "a", "s3://models/lora", tmp_path / "b")


def test_check_in_every_state(stored: ObjectServer, tmp_path: Path) -> None:
    folder = tmp_path / "m"

    def check(*arguments: str | Path, code: int) -> list[str]:
        asked = stored.counters.connections
        document = json.loads(run("--check", "--json", *arguments, code=code).stdout)
        assert stored.counters.connections == asked, "a probe must not need the network"
        assert document["complete"] is (code == 0)
        found: list[str] = document["problems"]
        return found

    assert "nothing was fetched into it, or not all" in check(folder, code=1)[0]
    assert not folder.exists()
    run(URL, folder, "--mode", "all")
    assert check(folder, code=0) == []
    assert check(f"{URL}/", folder, "--mode", "metadata", code=0) == []
    assert (
        "fetched from s3://models/org/m/, not from s3://models/other/" in check("s3://models/other", folder, code=1)[0]
    )
    key = next(iter(WEIGHTS))
    os.truncate(folder / key, 100)
    (folder / "config.json").unlink()
    (folder / "merges.txt").unlink()
    (folder / "merges.txt").symlink_to("/dev/null")
    assert sorted(check(folder, code=1)) == [
        f"{folder / 'config.json'}: No such file or directory",
        f"{folder / 'merges.txt'} is no file",
        f"{folder / key} has 100 bytes, not {len(WEIGHTS[key])}",
    ]
    (folder / "merges.txt").unlink()
    run(URL, folder, "--mode", "all")
    assert run("--check", folder).stdout == f"complete: {len(ALL)} files, 5.10 MB\n"
    run(URL, tmp_path / "meta")
    assert "was fetched with mode=metadata, not all" in check(tmp_path / "meta", "--mode", "all", code=1)[0]
    (tmp_path / "meta" / ".s3stream.json").write_text("{")
    assert "not written by this version" in check(tmp_path / "meta", code=1)[0]


def test_check_imports_nothing_that_takes_long() -> None:
    code = (
        "import sys; sys.argv = ['s3stream', 'fetch', '--check', '/nowhere']\n"
        "try:\n    from streamer.cli import main; main()\n"
        "except SystemExit as end:\n    assert end.code == 1, end.code\n"
        "assert not {'torch', 'aiobotocore', 'botocore'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_mistakes_end_in_one_message_and_their_code(stored: ObjectServer, tmp_path: Path) -> None:
    def message(code: int, *arguments: str | Path) -> str:
        done = run(*arguments, "--quiet", code=code)
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        return line

    assert "in pairs, and got 1 arguments" in message(2, URL)
    assert "in pairs, and got 3 arguments" in message(2, URL, tmp_path, URL)
    assert "is no folder on this machine" in message(2, tmp_path, URL)
    assert "the folder to fetch into is empty" in message(2, URL, "")
    assert "is given for two sources" in message(2, URL, tmp_path, "s3://models/b", f"{tmp_path}/../{tmp_path.name}")
    assert "there is no mode 'full' (one of metadata, weights, all)" in message(2, URL, tmp_path, "--mode", "full")
    assert "is not a number of bytes" in message(2, URL, tmp_path, "--max-bytes", "lots")
    stored.put("models", "w/model.safetensors", b"w")
    assert "nothing but weights" in message(3, "s3://models/w", tmp_path)
    assert "there are no objects here" in message(4, "s3://models/none", tmp_path)
    assert "and 1024 are allowed" in message(11, URL, tmp_path, "--max-bytes", "1KiB")
    (tmp_path / "file").touch()
    assert "a file or a symbolic link is where a folder should be" in message(10, URL, tmp_path / "file" / "m")
    stored.faults = [Fault(lambda *_: error_response(403, "AccessDenied"), method="GET", times=None)]
    assert "AccessDenied" in message(5, URL, tmp_path)
    assert tree(tmp_path).keys() <= {"file", "merges.txt"}, "an empty file needs no read"


def test_progress_is_lines_with_rate_and_rest(tmp_path: Path) -> None:
    with ObjectServer(bytes_per_second=40_000) as server:
        put_all(server)
        one_by_one = ("-o", "request_bytes=64KiB", "-o", "concurrency=1", "-o", "hedge=no")
        done = run(URL, tmp_path, "--json", *one_by_one, S3STREAM_ENDPOINT_URL=server.url)
    json.loads(done.stdout)
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr
    first, last = done.stderr.splitlines()
    assert re.fullmatch(rf"fetching {URL}: \d+\.\d\d kB of 300.06 kB, \d+\.\d\d kB/s, \d+ s left", first)
    assert re.fullmatch(rf"fetching {URL}: 300.06 kB of 300.06 kB, \d+\.\d\d kB/s", last)


def test_progress_is_a_bar_on_a_terminal(stored: ObjectServer, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*SCRIPTED, URL, str(tmp_path), "--mode", "all"],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # how a pty says that the other side is closed
            break
        if not data:
            break
        seen += data
    assert process.wait() == 0
    os.close(ours)
    assert "━".encode() in seen
    assert b"MB" in seen


def test_the_installed_command_has_it() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0
    assert "SRC DEST" in done.stdout
    assert "--check" in done.stdout
