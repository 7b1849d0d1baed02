"""The README says what the raw results say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks.end_to_end import ROWS
from tests.benchmarks.processes import ROOT
from tests.benchmarks.rig import RESULTS
from tests.benchmarks.sections import SECTIONS
from tests.benchmarks.tables import read_results, rewrite, section


def test_readme_is_what_is_written_from_the_results() -> None:
    readme = (ROOT / "README.md").read_text()
    assert rewrite(readme, read_results()) == readme
    for name in SECTIONS:
        if written := section(name, read_results()):
            assert written in readme
    for plot in RESULTS.glob("*.svg"):
        assert (RESULTS / f"{plot.stem}.json").exists()
    for line in readme.splitlines():
        if line.startswith("!["):
            assert (ROOT / line.partition("](")[2].rstrip(")")).exists(), line


def test_readme_follows_its_results() -> None:
    results: dict[str, Any] = read_results()
    readme = (ROOT / "README.md").read_text()
    results["faults"]["wall_ratio"]["median"] = 7.25
    changed = rewrite(readme, results)
    assert "takes 7.2 times as long" in changed
    del results["faults"]
    assert "<!-- measured: faults -->\n<!-- end of faults -->\n" in rewrite(readme, results)
    with pytest.raises(ValueError, match="marked are"):
        rewrite(readme.replace("<!-- measured: memory -->", ""), results)


def test_readme_quotes_the_raw_results() -> None:
    readme = (ROOT / "README.md").read_text()
    speed = json.loads((RESULTS / "end_to_end.json").read_text())
    for row in ROWS:
        cpu = speed["median_cpu_seconds_per_gib"][row]
        ratio = speed["cpu_ratio_to_aiobotocore_read"][row]["median"]
        bare = speed["cpu_ratio_to_bare_protocol"][row]["median"]
        assert f"| {row} | {cpu:.2f} | {bare:.2f} | {ratio:.2f} | {speed['median_wall_seconds'][row]:.2f} |" in readme
    memory = json.loads((RESULTS / "memory.json").read_text())
    for row, found in [*memory["rows"].items(), *memory.get("ranks", {"rows": {}})["rows"].items()]:
        assert f"| {row} | {found['peak_extra_bytes'] / (1 << 20):.0f} |" in readme


def test_readme_quotes_what_sharing_came_to() -> None:
    readme = (ROOT / "README.md").read_text()
    settings = json.loads((RESULTS / "sharing.json").read_text())["settings"]
    for name, found in settings.items():
        for row, wall in found["median_wall_seconds"].items():
            ratio, cpu = found["wall_ratio_to_share_auto"][row]["median"], found["median_cpu_seconds"][row]
            served, requests = found["median_served_ratio"][row], found["median_requests"][row]
            quoted = f"| {row} | {wall:.2f} | {ratio:.2f} | {cpu:.2f} | {served:.3f} | {requests:.0f} "
            assert f"| {name.split()[1]} {quoted}| {found['peak_node_mib'][row]} |" in readme


def test_readme_quotes_the_peers() -> None:
    readme = (ROOT / "README.md").read_text()
    plain, tls = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("peers", "peers_tls"))
    for row, cpu in plain["median_cpu_seconds_per_gib"].items():
        ratio = plain["cpu_ratio_to_s3stream"][row]
        quoted = f"| {row} | {cpu:.2f} | {ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f}) | "
        if row in tls["median_cpu_seconds_per_gib"]:
            ratio = tls["cpu_ratio_to_s3stream"][row]
            quoted += f"{tls['median_cpu_seconds_per_gib'][row]:.2f} | "
            quoted += f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f}) |"
        assert quoted in readme


def test_readme_quotes_what_tracing_costs() -> None:
    readme = (ROOT / "README.md").read_text()
    found = json.loads((RESULTS / "trace_cost.json").read_text())
    for size in found["sizes"]:
        each, more = size["median_microseconds_per_tensor"], size["added_to_plain"]
        columns = [size["tensors"], size["files"]]
        for setting in ("plan", "load"):
            columns += [each[f"{setting}: plain"], f"{more[f'{setting}: traced']['median']:.2f}"]
            idle = more.get(f"{setting}: plain in an idle dispatch mode")
            columns.append(f"{idle['median']:.2f}" if idle else "")
        columns.append(f"{size['headers_trace_and_plan_cpu_seconds']['median']:.2f}")
        assert f"| {' | '.join(map(str, columns))} |" in readme
    exponents = found["growth_exponents"]
    quoted = f"plan: traced {exponents['plan: traced']:.3f}, load: traced {exponents['load: traced']:.3f}; 1 is linear"
    assert quoted in " ".join(readme.split())


def test_readme_quotes_what_the_plan_cache_saves() -> None:
    readme = (ROOT / "README.md").read_text()
    found = json.loads((RESULTS / "plan_cache.json").read_text())
    assert [size["tensors"] for size in found["sizes"]] == [1621, 9411, 90427]
    for size in found["sizes"]:
        for row in ("traced and kept", "used"):
            quoted = [str(size["tensors"]), row]
            for field in ("cpu_seconds", "trace_cpu_seconds"):
                to_traced = size[f"{field}_ratio_to_traced"][row]
                spread = "{median:.2f} ({min:.2f}-{max:.2f})".format(**to_traced)
                quoted += [f"{size[f'median_{field}'][row]:.2f}", spread]
            assert f"| {' | '.join(quoted)} |" in readme
    assert f"used {found['growth_exponents']['used']:.3f}; 1 is linear" in " ".join(readme.split())


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
