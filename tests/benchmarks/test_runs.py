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
from tests.benchmarks.rig import RESULTS


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


def test_readme_quotes_the_raw_results() -> None:
    readme = (ROOT / "README.md").read_text()
    speed = json.loads((RESULTS / "end_to_end.json").read_text())
    for row in ROWS:
        cpu = speed["median_cpu_seconds_per_gib"][row]
        ratio = speed["cpu_ratio_to_aiobotocore_read"][row]["median"]
        bare = speed["cpu_ratio_to_bare_protocol"][row]["median"]
        assert f"| {row} | {cpu:.2f} | {bare:.2f} | {ratio:.2f} | {speed['median_wall_seconds'][row]:.2f} |" in readme
    memory = json.loads((RESULTS / "memory.json").read_text())
    for row, found in memory["rows"].items():
        assert f"| {row} | {found['peak_extra_bytes'] / (1 << 20):.0f} |" in readme


def test_readme_quotes_what_sharing_came_to() -> None:
    readme = (ROOT / "README.md").read_text()
    (found,) = json.loads((RESULTS / "sharing.json").read_text())["settings"].values()
    for row, wall in found["median_wall_seconds"].items():
        ratio, cpu = found["wall_ratio_to_share_auto"][row]["median"], found["median_cpu_seconds"][row]
        served, memory = found["median_served_ratio"][row], found["peak_node_mib"][row]
        assert f"| {row} | {wall:.2f} | {ratio:.2f} | {cpu:.2f} | {served:.3f} | {memory} |" in readme


def test_readme_quotes_the_peers() -> None:
    readme = (ROOT / "README.md").read_text()
    plain, tls = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("peers", "peers_tls"))
    for row, cpu in plain["median_cpu_seconds_per_gib"].items():
        quoted = f"| {row} | {cpu:.2f} | {plain['cpu_ratio_to_s3stream'][row]['median']:.2f} | "
        if row in tls["median_cpu_seconds_per_gib"]:
            ratio = tls["cpu_ratio_to_s3stream"][row]["median"]
            quoted += f"{tls['median_cpu_seconds_per_gib'][row]:.2f} | {ratio:.2f}"
        assert quoted in readme


def test_readme_quotes_what_tracing_costs() -> None:
    readme = (ROOT / "README.md").read_text()
    found = json.loads((RESULTS / "trace_cost.json").read_text())
    for size in found["sizes"]:
        each, more = size["median_microseconds_per_tensor"], size["added_to_plain"]
        columns = [size["tensors"], size["files"]]
        for setting in ("plan", "load"):
            columns += [each[f"{setting}: plain"], f"{more[f'{setting}: traced']['median']:.2f}"]
        columns.append(size["headers_trace_and_plan_cpu_seconds"]["median"])
        assert f"| {' | '.join(map(str, columns))} |" in readme
    exponents = found["growth_exponents"]
    assert f"exponents are {exponents['plan: traced']} and {exponents['load: traced']}" in readme


def test_readme_quotes_what_faults_cost() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    found = json.loads((RESULTS / "faults.json").read_text())
    wall = found["median_wall_seconds"]
    assert f"A load of {found['checkpoint_bytes'] / 1e6:.0f} MB from a store that breaks a tenth" in text
    assert f"takes {found['wall_ratio']['median']:.1f} times as long" in text
    assert f"({wall['with faults']:.2f} s beside {wall['in good health']:.2f} s" in text


def test_readme_quotes_the_census() -> None:
    lines = (ROOT / "tests" / "vllm" / "results" / "census.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    loaded = {row["case"] for row in rows if row["equal"] is not None}
    left_out = {row["case"] for row in rows if row["equal"] is None}
    assert all(row["equal"] for row in rows if row["case"] in loaded)
    assert len(rows) == 2 * len(loaded) + len(left_out)
    assert all(row["reason"] for row in rows if row["case"] in left_out)
    readme = (ROOT / "README.md").read_text()
    assert f"Of [{len(loaded) + len(left_out)} checkpoints]" in readme
    assert f"{len(loaded)} end with every parameter" in readme
    assert f"the other {len(left_out)} are those" in readme


def test_readme_quotes_the_fault_matrix() -> None:
    lines = (ROOT / "tests" / "faults" / "results" / "matrix.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    exact = sum(row["outcome"] == "exact" for row in rows)
    assert all(row["outcome"] == "exact" or row["outcome"].endswith("Error") for row in rows)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"of {len({row['fault'] for row in rows})} faults by position" in text
    assert f"has {len(rows)} cells: {exact} loads were exact" in text
