"""The benchmark runs, checks its own results, and reports what the README quotes. No speed is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks import peers
from tests.benchmarks.end_to_end import ROWS
from tests.benchmarks.node_memory import Node
from tests.benchmarks.processes import ROOT


def test_end_to_end_at_a_small_size(tmp_path: Path) -> None:
    command = ["-m", "tests.benchmarks.end_to_end", "--rounds", "1", "--layers", "1", "--results", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "end_to_end.json").read_text())
    (one,) = document["rounds"]
    assert list(one) == ROWS
    assert all(row["cpu_seconds"] > 0 and row["nbytes"] > 100_000_000 for row in one.values())
    assert one["s3stream"]["nbytes"] == one["s3stream"]["needed_bytes"] == document["checkpoint_bytes"]
    assert one["s3stream, rank 1 of 2"]["needed_bytes"] < document["checkpoint_bytes"] * 0.51


def test_faults_at_a_small_size(tmp_path: Path) -> None:
    command = ["-m", "tests.benchmarks.faults", "--rounds", "1", "--layers", "1", "--results", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "faults.json").read_text())
    (one,) = document["rounds"]
    assert one["in good health"]["retries"] == 0
    assert one["with faults"]["retries"] >= 10


def test_peers_at_a_small_size(tmp_path: Path) -> None:
    """Over TLS, which has more to go wrong; the other clients come with the extra `bench`."""
    rows = ["s3stream", "bare protocol", "boto3", "aiobotocore read()"]
    options = ["--rounds", "1", "--layers", "1", "--tls", "--results", str(tmp_path), "--only", *rows[1:]]
    command = [sys.executable, "-m", "tests.benchmarks.peers", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "peers_tls.json").read_text())
    (one,) = document["rounds"]
    assert list(one) == rows
    nbytes, ranges = document["checkpoint_bytes"], -(-document["checkpoint_bytes"] // document["range_bytes"])
    bare = one["bare protocol"]
    assert [bare[name] for name in ("served_bytes", "requests", "connections")] == [nbytes, ranges, 16]
    for row, found in one.items():
        assert nbytes <= found["served_bytes"] < nbytes * 1.05, row  # listing, header, perhaps a repeated range
        assert ranges <= found["requests"] < ranges + 10, row
        assert found["cpu_seconds"] > 0
    assert document["cpu_ratio_to_s3stream"]["s3stream"]["median"] == 1


def test_a_peer_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "boto3", replace(peers.PEERS["boto3"], packages=["no-such-client"]))
    with pytest.raises(SystemExit, match="row 'boto3' needs no-such-client.*extra `bench`.*--only"):
        peers.choose(["boto3", "s5cmd"], tls=False)
    assert peers.choose(["aiobotocore read()"], tls=False) == ["s3stream", "aiobotocore read()"]


def test_a_peer_that_cannot_do_tls_is_not_skipped_silently() -> None:
    with pytest.raises(SystemExit, match="s3torchconnector has no row under --tls: it takes no private"):
        peers.choose(["s3torchconnector"], tls=True)


def test_sharing_at_a_small_size(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--layers", "1", "--sizes", "2", "--stores", "plain", "--only", "share=auto"]
    command = [sys.executable, "-m", "tests.benchmarks.sharing", *options, "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "sharing.json").read_text())["settings"]["plain, 2 ranks"]
    ((row,), memory) = [one["share=auto"] for one in found["rounds"]], found["memory"]["share=auto"]
    assert 1 <= row["served_ratio"] < 1.1  # 1.16 if each rank read for itself
    assert row["requests"] > 20
    assert row["cpu_seconds"] > 0
    assert row["wall_seconds"] > 0
    assert 0 < memory["peak_node_bytes"] < memory["arena_bytes"] + (200 << 20)


#: Maps the shared memory of argument 1 and has as much more as argument 2 says, once it is told to.
_HOLDER = """
import mmap, sys
shared = mmap.mmap(int(sys.argv[1]), 64 << 20)
print("ready", flush=True)
sys.stdin.readline()
for start in range(0, len(shared), 4096):
    shared[start] = 1
own = b"x" * int(sys.argv[2])
print("touched", flush=True)
sys.stdin.readline()
"""


def test_memory_that_processes_share_is_counted_once() -> None:
    memory = os.memfd_create("shared")
    os.ftruncate(memory, 64 << 20)
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(memory), str(own)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[memory],
        )
        for own in (0, 32 << 20)
    ]
    try:
        assert [holder.stdout and holder.stdout.readline() for holder in holders] == ["ready\n"] * 2
        with Node([holder.pid for holder in holders]) as node:
            for holder in holders:
                assert holder.stdin
                holder.stdin.write("\n")
                holder.stdin.flush()
                assert holder.stdout
                assert holder.stdout.readline() == "touched\n"
            time.sleep(0.2)
            extra = node.finish()["peak_node_bytes"]
    finally:
        os.close(memory)
        for holder in holders:
            holder.kill()
            holder.communicate()
    assert 96 << 20 <= extra < 100 << 20
