"""Growth, predictions, memory of ranks, and the one command that runs all parts. No speed is asserted."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as suite
from tests.benchmarks import engine, predict, scale, sharing
from tests.benchmarks.markdown import paragraph, table
from tests.benchmarks.processes import ROOT
from tests.benchmarks.rig import RESULTS, growth_exponent
from tests.benchmarks.tables import read_results, section
from tests.servers.object_server import ObjectServer

MIB = 1 << 20


def run(module: str, *options: str) -> str:
    command = [sys.executable, "-m", f"tests.benchmarks{module}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_scale_at_small_sizes(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--tensors", "300", "1800", "--mib", "30", "52"]
    run(".scale", *options, "--results", str(tmp_path))
    document = json.loads((tmp_path / "scale.json").read_text())
    small, large = document["by_tensors"]["sizes"]
    assert (small["tensors"], large["tensors"]) == (300, 1803)
    assert (small["files"], large["files"]) == (1, 4)
    assert large["requests"] > small["requests"] >= 2  # a listing and a header each
    assert large["trace_and_plan_cpu_seconds"] > 2 * small["trace_and_plan_cpu_seconds"]
    assert set(document["by_tensors"]["growth_exponents"]) == {"headers_cpu_seconds", "trace_and_plan_cpu_seconds"}
    for row, part in {"whole": 1.0, "rank 1 of 2": 0.7}.items():  # half, and the rows of which it takes a half
        found = document["by_bytes"]["rows"][row]
        for size, mib in zip(found["sizes"], (29.5, 51.0), strict=True):
            assert size["fetched_bytes"] / MIB == pytest.approx(mib * part, rel=0.1)
            assert size["requests"] > 3
        assert set(found["growth_exponents"]) == {"cpu_seconds", "wall_seconds", "requests"}


def test_sizes_are_what_they_are_called() -> None:
    for tensors in scale.TENSORS:
        assert sum(1 for _ in scale.tensors_of(scale.thin_config(tensors))) == pytest.approx(tensors, rel=0.01)
    for mib in scale.MIBS:
        nbytes = sum(2 * scale._product(shape) for _, _, shape in scale.tensors_of(scale.thick_config(mib * MIB)))
        assert nbytes / MIB == pytest.approx(mib, rel=0.15)


def test_growth_exponents() -> None:
    assert growth_exponent((x, 5 * x) for x in (1, 10, 300)) == 1
    assert growth_exponent((x, 0.1 * x**2) for x in (1, 10, 300)) == 2
    assert growth_exponent((x, 7) for x in (1, 10, 300)) == 0


def test_memory_of_two_ranks_at_a_small_size(tmp_path: Path) -> None:
    """The cap is 16 MiB for a tensor of 32 MiB, all of which goes through shared memory."""
    options = ["--largest-mib", "32", "--only", "2 ranks that share", "--results", str(tmp_path)]
    run(".memory", *options)
    found = json.loads((tmp_path / "memory.json").read_text())["ranks"]
    assert found["cap_bytes"] == found["largest_tensor_bytes"] // 2 == 16 * MIB
    assert list(found["rows"]) == ["2 ranks that share"]
    (row,) = found["rows"].values()
    assert row["arena_bytes"] <= found["cap_bytes"]
    assert 0 < row["peak_extra_bytes"] < found["limit_bytes"]
    assert 1 <= row["served_ratio"] < 1.1


def test_one_command_runs_parts_and_writes_about_them(tmp_path: Path) -> None:
    output = run("", "header_read", "--predict-error", "--quick", "--results", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["header_read.json", "predict.json", "predict.svg"]
    assert section("predict", read_results(tmp_path)) in output
    assert "failed: nothing" in output
    slow, linked = json.loads((tmp_path / "predict.json").read_text())["points"]
    assert slow["predicted_seconds"] == pytest.approx(0.9, rel=0.2)  # 257 MB by 16 connections of 20 MB/s
    assert linked["predicted_seconds"] == pytest.approx(257e6 / 250e6, rel=0.1)  # 2 Gbit/s
    for point in (slow, linked):
        # The store is as slow as it was told to be, so nothing can be much faster than was predicted.
        assert point["measured_load_seconds"] > 0.9 * point["predicted_seconds"]
        assert point["measured_load_seconds"] >= point["measured_read_seconds"]


def test_throughput_at_small_sizes(tmp_path: Path) -> None:
    run(".throughput", "--rounds", "1", "--layers", "1", "--tensors", "2000", "--results", str(tmp_path))
    found = json.loads((tmp_path / "throughput.json").read_text())["pairs"]
    assert list(found) == ["more requests", "while tracing"]
    for pair in found.values():
        (one,) = pair["rounds"]
        assert one["with"]["needed_bytes"] == one["without"]["needed_bytes"] > 0.9 * pair["checkpoint_bytes"]
        assert pair["wall_ratio"]["median"] == round(one["with"]["wall_seconds"] / one["without"]["wall_seconds"], 3)
    assert "30,000 small tensors" in section("throughput", read_results(tmp_path))


def test_errors_of_predictions_are_relative_to_what_was_measured() -> None:
    assert predict.errors(1.5, {"load_seconds": [3.0, 1.0, 2.0]}) == {
        "measured_load_seconds": 2.0,
        "relative_error_to_load_seconds": -0.25,
    }


def test_a_point_says_the_same_to_the_server_and_to_plan() -> None:
    point = predict.Point(1, first_byte_ms=30, connection_mbps=90, link_gbps=4, concurrency=8)
    assert point.server_options() == [
        "--first-byte-seconds=0.03",
        "--bytes-per-second=90000000.0",
        "--link-bytes-per-second=500000000.0",
    ]
    assert {"--first-byte-ms=30", "--connection-mbps=90", "--link-gbps=4"} < set(point.plan_options())


def test_connections_share_the_servers_link() -> None:
    with ObjectServer(link_bytes_per_second=20e6) as server:
        server.put("bucket", "object", bytes(2_500_000))

        def get() -> None:
            with urllib.request.urlopen(f"{server.url}/bucket/object") as response:
                assert len(response.read()) == 2_500_000

        readers = [threading.Thread(target=get) for _ in range(4)]
        began = time.monotonic()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert 0.45 < time.monotonic() - began < 5  # 10 MB; 0.125 s if each had it to itself


def test_what_is_distributed_needs_two_ranks() -> None:
    assert sharing.is_of("share=off", 1, [])
    assert sharing.is_of("Run:ai", 1, [1, 2])
    assert not sharing.is_of("Run:ai, distributed", 1, [1, 2])
    assert sharing.is_of("Run:ai, distributed", 2, [1, 2])
    assert not sharing.is_of("Run:ai", 4, [1, 2])


def test_engines_must_load_the_same() -> None:
    row = {"digest": "a", "served_ratio": 1.0}
    engine.check_round({"s3stream": row, "default, from disk": {**row, "served_ratio": 0.0}})
    with pytest.raises(RuntimeError, match="parameters differ"):
        engine.check_round({"s3stream": row, "Run:ai": {**row, "digest": "b"}})
    with pytest.raises(RuntimeError, match=r"Run:ai asked for 0\.500"):
        engine.check_round({"s3stream": row, "Run:ai": {**row, "served_ratio": 0.5}})


def test_digests_tell_parameters_apart() -> None:
    import torch

    def digest(**parameters: torch.Tensor) -> str:
        return engine.digest(iter(parameters.items()))

    one = torch.arange(6, dtype=torch.bfloat16)
    assert digest(a=one, b=one) == digest(b=one.clone(), a=one)
    different = [digest(a=one), digest(b=one), digest(a=one.reshape(2, 3)), digest(a=one.float()), digest(a=one + 1)]
    assert len(set(different)) == len(different)


def test_parts_that_need_vllm_are_not_left_out_silently(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="trace_cost needs an interpreter with vLLM: name it with --vllm"):
        suite.commands([], None, tmp_path, is_quick=False)
    found = suite.commands([], "/other/python", tmp_path, is_quick=True)
    assert list(found) == list(suite.PARTS)
    others = {name for name, command in found.items() if command[0] == "/other/python"}
    assert others == {"trace_cost", "plan_cache", "engine"}
    assert all(command[-2:] == ["--results", str(tmp_path)] for command in found.values())
    assert list(suite.commands(["scale"], None, tmp_path, is_quick=False)) == ["scale"]


@pytest.mark.parametrize("is_quick", [True, False])
def test_options_of_parts_are_options_that_they_have(
    is_quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    for command in suite.commands([], sys.executable, tmp_path, is_quick=is_quick).values():
        monkeypatch.setattr(sys, "argv", command[2:])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(command[2]).main()
        assert ended.value.code == 0, command


def test_a_part_that_fails_is_named_when_the_others_have_run(capfd: pytest.CaptureFixture[str]) -> None:
    wanted = {"bad": [sys.executable, "-c", "raise SystemExit(3)"], "good": [sys.executable, "-c", "print('ran')"]}
    assert suite.run(wanted) == ["bad"]
    output = capfd.readouterr().out
    assert "bad: exit status 3" in output
    assert "ran\n" in output


def test_plots_are_the_same_for_the_same_results(tmp_path: Path) -> None:
    drawn = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        for result in ("peers", "sharing"):
            shutil.copy(RESULTS / f"{result}.json", folder)
        run(".plots", "--results", str(folder))
        drawn.append({path.name: path.read_text() for path in folder.glob("*.svg")})
    assert set(drawn[0]) == {"peers.svg", "sharing.svg"}
    assert drawn[0] == drawn[1]
    assert "bytes sent / checkpoint" in drawn[0]["sharing.svg"]
    for row in json.loads((RESULTS / "peers.json").read_text())["median_cpu_seconds_per_gib"]:
        assert row in drawn[0]["peers.svg"]


def test_code_is_not_wrapped() -> None:
    words = "word " * 22 + "`python -m tests.benchmarks`"
    assert paragraph(words).splitlines()[1] == "`python -m tests.benchmarks`"


def test_tables_have_as_many_cells_as_titles() -> None:
    assert table("a | b", [(1, "x")]) == "| a | b |\n| --- | --- |\n| 1 | x |\n"
    with pytest.raises(ValueError, match="1 cells under 2 titles"):
        table("a | b", [(1,)])
