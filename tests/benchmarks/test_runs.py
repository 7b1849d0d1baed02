"""The benchmark runs, checks its own results, and reports what the README quotes. No speed is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.end_to_end import ROWS
from tests.benchmarks.rig import RESULTS, ROOT


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
