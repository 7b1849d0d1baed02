"""The numbers in `docs/` are those of the results and of the code."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamer.cli.output import DOLLARS_PER_REQUEST
from streamer.config import StreamConfig
from streamer.fetch.engine import part_of, slab_bytes_for
from streamer.option_values import parse_byte_count
from tests.benchmarks.comparison import rewrite
from tests.benchmarks.rig import RESULTS
from tests.benchmarks.tables import read_results
from tests.cli.test_cli import run_json
from tests.docs.markdown import ROOT
from tests.sparse import LLAMA_3_70B, llama_3_70b, write_sparse

OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def test_comparison_is_what_is_written_from_the_results() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    results = read_results()
    assert rewrite(page, results) == page
    results["peers"]["cpu_ratio_to_s3stream"]["obstore"]["median"] = 123.456
    assert "| 123.46 |" in rewrite(page, results)
    with pytest.raises(ValueError, match="marked are 0"):
        rewrite(page.replace("<!-- measured: comparison -->", ""), results)


def test_comparison_quotes_the_raw_results() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    peers = json.loads((RESULTS / "peers.json").read_text())
    for row, ratio in peers["cpu_ratio_to_s3stream"].items():
        assert re.search(rf"^\| {re.escape(row)} \| [\d.]* \| {ratio['median']:.2f} \|", page, re.M), row
    for one in json.loads((RESULTS / "sharing.json").read_text())["settings"].values():
        for row, wall in one["wall_ratio_to_share_auto"].items():
            assert re.search(rf"\| {re.escape(row)} \| [\d.]+ \| {wall['median']:.2f} \|", page), row


def test_requests_in_flight_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d) \| (\d GiB) \| (\d MiB) \| (\d+) \| (\d+) \|$", OPERATIONS, re.M)
    assert len(rows) >= 6
    for ranks, buffer_bytes, request, each, node in rows:
        config = part_of(StreamConfig(buffer_bytes=parse_byte_count(buffer_bytes.replace(" ", ""))), int(ranks))
        slab = slab_bytes_for(config)
        assert slab == parse_byte_count(request.replace(" ", ""))
        assert min(config.buffer_bytes // slab, config.max_concurrency) == int(each)
        assert int(each) * int(ranks) == int(node)


def test_costs_of_a_start_are_those_of_plan(tmp_path: Path) -> None:
    write_sparse(tmp_path, llama_3_70b(), LLAMA_3_70B)
    cells = r"([\d.]+) GB \| (\d+) \| ([\d.]+) \| (\d+) \| (\d+)"
    rows = re.findall(rf"^\| (none|`\w+=.+`) \| {cells} \|$", OPERATIONS, re.M)
    assert len(rows) == 5

    def plan_with(options: str) -> dict[str, Any]:
        given = [word for option in re.findall(r"`(.+?)`", options) for word in ("--option", option)]
        return run_json("plan", str(tmp_path), "--tp", "8", "--rank", "0", *given)

    with ThreadPoolExecutor() as pool:  # each waits for a process
        plans = list(pool.map(plan_with, [row[0] for row in rows]))
    for plan, (_, gigabytes, requests, dollars, seconds, gave_up) in zip(plans, rows, strict=True):
        assert f"{plan['node_bytes'] / 1e9:.2f}" == gigabytes
        assert plan["node_requests"] == int(requests)
        assert f"{int(requests) * DOLLARS_PER_REQUEST:.4f}" == dollars
        (fleet,) = (row for row in plan["projection"] if row["nodes"] == 64)
        assert (round(fleet["seconds"]), fleet["gave_up"]) == (int(seconds), int(gave_up))
