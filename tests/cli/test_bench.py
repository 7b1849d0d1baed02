"""``s3stream bench`` and the times that ``s3stream plan`` predicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamer.checkpoint.checkpoint import Checkpoint, CheckpointFile
from streamer.cli.app import app
from streamer.cli.bench import bench_document
from streamer.cli.measure import Measured, Run
from streamer.config import StreamConfig
from streamer.plan.timing import StoreModel, predict_seconds
from tests.cli.test_cli import run, run_json
from tests.files import entry, raw_file
from tests.servers.object_server import Fault, ObjectServer, error_response
from tests.servers.s3_client import s3_client
from tests.sparse import LLAMA_3_70B, llama_3_70b, write_sparse

MIB = 1 << 20
FILE = raw_file({"a": entry("U8", [4 * MIB], 0, 4 * MIB)}, bytes(4 * MIB))
NAMES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
QUICK = ("--concurrency", "2,3", "--sizes", "256KiB", "--seconds", "0.2")


def put(server: ObjectServer) -> None:
    second = raw_file({"b": entry("U8", [4 * MIB], 0, 4 * MIB)}, bytes(4 * MIB))
    for name, content in zip(NAMES, (FILE, second), strict=True):
        server.put("bucket", f"m/{name}", content)


@pytest.fixture
def slow_store() -> Iterator[ObjectServer]:
    with ObjectServer(require_signature=True, first_byte_seconds=0.05, bytes_per_second=20e6) as server:
        put(server)
        yield server


def test_measures_and_predicts_a_store_of_known_speed(slow_store: ObjectServer) -> None:
    grid = ("--concurrency", "1,4", "--sizes", "256KiB,1MiB", "--seconds", "0.6")
    found = run_json("bench", "s3://bucket/m", "--endpoint-url", slow_store.url, *grid)
    runs = found["runs"]
    settings = [(row["concurrency"], row["request_bytes"]) for row in runs]
    assert settings == [(1, MIB // 4), (1, MIB), (4, MIB // 4), (4, MIB)]
    for row in runs:
        assert row["seconds"] >= 0.6
        assert row["bytes"] == row["requests"] * row["request_bytes"]
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"], rel=0.01)
        # The server sleeps this long for each request; a client that is faster has measured wrongly.
        each = 0.05 + 0.9 * row["request_bytes"] / 20e6
        assert row["bytes_per_second"] <= row["concurrency"] * row["request_bytes"] / each
        assert (row["retries"], row["throttled"]) == (0, 0)
        assert row["cpu_seconds_per_gib"] > 0
        assert row["prediction_error"] == pytest.approx(row["predicted_seconds"] / row["seconds"] - 1, abs=0.01)
    # Sleep is nearly all of the time, so that a busy machine does not matter much; one odd run may.
    assert sorted(abs(row["prediction_error"]) for row in runs)[1] < 0.4
    assert found["best"] == runs[3]
    assert found["model"]["first_byte_seconds"] >= 0.05
    assert found["model"]["link_bytes_per_second"] == runs[3]["bytes_per_second"]
    assert found["load_seconds"] > found["checkpoint_bytes"] / found["model"]["link_bytes_per_second"]
    assert found["checkpoint_bytes"] == 2 * len(FILE)
    assert found["requests"] == slow_store.counters.requests["GET"]
    assert found["bytes"] == sum(end - start for key, start, end in slow_store.counters.ranges if key)
    assert found["request_cost_dollars"] == pytest.approx(found["requests"] * 4e-7, abs=1e-6)


def test_reads_are_spread_over_files_and_positions(server: ObjectServer) -> None:
    put(server)
    grid = ("--concurrency", "2,3", "--sizes", "256KiB", "--seconds", "60", "--max-bytes", "40MiB")
    run_json("bench", "s3://bucket/m", "--endpoint-url", server.url, *grid)
    read = [(key, start) for key, start, end in server.counters.ranges if end - start == MIB // 4]
    for name in NAMES:
        starts = {start for key, start in read if key.endswith(name)}
        assert starts == set(range(0, 4 * MIB, MIB // 4))
    assert len({start // MIB for _, start in read[:8]}) == 4, "few reads are spread, too"


@pytest.mark.parametrize("kind", ["moto", "file", "fsspec"])
def test_any_store(kind: str, moto_url: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(FILE)
    arguments: tuple[str, ...] = (f"{'file' if kind == 'file' else 'local'}://{tmp_path}",)
    if kind == "moto":
        client = s3_client(moto_url)
        client.create_bucket(Bucket="bench")
        client.put_object(Bucket="bench", Key="m/model.safetensors", Body=FILE)
        arguments = ("s3://bench/m", "--endpoint-url", moto_url)
    found = run_json("bench", *arguments, *QUICK)
    assert [row["concurrency"] for row in found["runs"]] == [2, 3]
    assert all(row["bytes"] >= row["concurrency"] * MIB // 4 for row in found["runs"])
    assert (found["request_cost_dollars"] is not None) == (kind == "moto")
    text = run("bench", *arguments, *QUICK).stdout
    assert "at once" in text
    assert "--option request_bytes=262144\n" in text
    assert ("at the price of S3 Standard" in text) == (kind == "moto")


def test_files_smaller_than_a_request_are_read_whole(tmp_path: Path) -> None:
    for name, tensor in zip(NAMES, "ab", strict=True):
        (tmp_path / name).write_bytes(raw_file({tensor: entry("U8", [100], 0, 100)}, bytes(100)))
    found = run_json("bench", str(tmp_path), *QUICK)
    for row in found["runs"]:
        assert row["bytes"] == row["requests"] * (found["checkpoint_bytes"] // 2)


def test_the_cap_holds_and_is_enough_for_something(server: ObjectServer) -> None:
    put(server)
    target = ("bench", "s3://bucket/m", "--endpoint-url", server.url, "--concurrency", "2,4", "--sizes", "1MiB")
    found = run_json(*target, "--seconds", "30", "--max-bytes", "40MiB")
    assert 35 * MIB < found["bytes"] <= 40 * MIB
    assert all(row["requests"] >= row["concurrency"] for row in found["runs"])
    before = server.counters.body_bytes
    assert "less than two reads for each connection" in run(*target, "--max-bytes", "16MiB", code=2).stderr
    assert server.counters.body_bytes - before < MIB, "only headers were read"


def test_refusals_are_counted(server: ObjectServer) -> None:
    put(server)
    refusal = Fault(lambda *_: error_response(503, "SlowDown", "Please reduce your request rate."), method="GET")
    refusal.skip, refusal.times = 60, 5  # after headers, probes and warm-up
    server.faults = [refusal]
    grid = ("--concurrency", "4", "--sizes", "256KiB", "--seconds", "1", "-o", "retry_first_wait_seconds=0.01")
    text = run("bench", "s3://bucket/m", "--endpoint-url", server.url, *grid).stdout
    assert "the store asked for fewer requests 5 times" in text
    refusal.skip, refusal.times = 60, 5
    (row,) = run_json("bench", "s3://bucket/m", "--endpoint-url", server.url, *grid)["runs"]
    assert (row["retries"], row["throttled"]) == (5, 5)
    assert row["requests"] == row["bytes"] // row["request_bytes"] + 5


def test_what_is_wrong_is_said(server: ObjectServer, tmp_path: Path) -> None:
    put(server)
    server.put("bucket", "empty/model.safetensors", raw_file({}))
    endpoint = ("--endpoint-url", server.url)

    def message(code: int, *arguments: str) -> str:
        done = CliRunner().invoke(app, ["bench", *arguments, *endpoint])
        assert (done.exit_code, done.stdout) == (code, "")
        return done.stderr

    assert "'8,x' is no list of numbers" in message(2, "s3://bucket/m", "--concurrency", "8,x")
    assert "concurrency must be at least 1" in message(2, "s3://bucket/m", "--concurrency", "0")
    assert "'8 parsecs' is not a number of bytes" in message(2, "s3://bucket/m", "--sizes", "1MiB,8 parsecs")
    assert "--seconds must be a positive number" in message(2, "s3://bucket/m", "--seconds", "0")
    assert "do not fit buffer_bytes" in message(2, "s3://bucket/m", "--concurrency", "129")
    assert "no such bucket" in message(4, "s3://missing/m")
    assert "holds no weights to read" in message(3, "s3://bucket/empty")
    server.faults = [Fault(lambda *_: error_response(403, "AccessDenied"), method="GET", times=None)]
    assert "AccessDenied" in message(5, "s3://bucket/m")


def measured(*rates: tuple[int, int, float]) -> dict[str, Any]:
    """The document of runs of 100 requests each, given as concurrency, bytes of a request and bytes per second."""
    runs = []
    for concurrency, size, rate in rates:
        config = StreamConfig(concurrency=concurrency, request_bytes=size)
        runs.append(Run(config, [size] * 100, seconds=100 * size / rate))
    files = (CheckpointFile("a", 396 * MIB, 100, 1, {}), CheckpointFile("b", 141 * MIB, 100, 1, {}))
    model = StoreModel(0.03, 90e6, max(run.rate for run in runs))
    return bench_document(Measured(Checkpoint("s3://b/m/", files, {}), model, runs, 0, 0))


def test_best_is_the_fewest_connections_that_are_nearly_as_fast_as_any() -> None:
    found = measured((8, MIB, 500e6), (32, MIB, 960e6), (32, 8 * MIB, 970e6), (64, 8 * MIB, 1000e6))
    assert found["best"] == found["runs"][2]
    assert found["model"]["link_bytes_per_second"] == 1000e6
    model = StoreModel(0.03, 90e6, 1000e6)
    whole = [*[8 * MIB] * 49, 4 * MIB, *[8 * MIB] * 17, 5 * MIB]
    assert found["checkpoint_bytes"] == sum(whole)
    assert found["load_seconds"] == pytest.approx(predict_seconds(whole, 32, model), abs=1e-3)
    assert found["runs"][0]["predicted_seconds"] == pytest.approx(13 * (0.03 + MIB / 90e6), abs=1e-3)
    found = measured((8, MIB, 500e6), (64, 8 * MIB, 1000e6))
    assert found["best"] == found["runs"][1]


# -- plan ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of few layers, with the shapes of the 70B; sparse files."""
    folder = tmp_path_factory.mktemp("llama")
    tensors = (tensor for tensor in llama_3_70b() if _layer(tensor[0]) < 3)
    write_sparse(folder, tensors, {**LLAMA_3_70B, "num_hidden_layers": 3})
    return folder


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else 0


@pytest.mark.parametrize("share", ["auto", "off"])
def test_plan_predicts_from_the_requests_of_its_ranks(llama: Path, share: str) -> None:
    """One connection makes the arithmetic easy."""
    options = ("--tp", "2", "--rank", "1", "-o", "concurrency=1", "-o", "max_concurrency=1", "-o", f"share={share}")
    plan = run_json("plan", str(llama), *options, "--first-byte-ms", "20", "--connection-mbps", "50")
    (row,) = plan["ranks"]
    both = plan["node_requests"] * 0.02 + plan["node_bytes"] / 50e6
    own = row["requests"] * 0.02 + row["fetch_bytes"] / 50e6
    assert plan["predicted_seconds"] == pytest.approx(max(own, both - own), abs=0.01)
    few, some, many = plan["projection"]
    assert [row["nodes"] for row in plan["projection"]] == [8, 64, 512]
    assert (few["refused"], few["gave_up"], some["refused"]) == (0, 0, 0)
    assert few["seconds"] == some["seconds"] == pytest.approx(both / 2, rel=0.05)
    assert many["refused"] > 0


def test_plan_knows_the_link_that_ranks_share(llama: Path) -> None:
    store = ("--link-gbps", "10", "--first-byte-ms", "40")
    plan = run_json("plan", str(llama), "--tp", "2", "-o", "concurrency=16", *store)
    assert plan["predicted_seconds"] == pytest.approx(plan["floor_seconds"]["10_gbit"] + 0.04, abs=0.01)
    assert plan["projection"][0]["seconds"] == pytest.approx(plan["predicted_seconds"], rel=0.05)
    assert plan["model"]["link_bytes_per_second"] == 1.25e9
    text = run("plan", str(llama), "-o", "concurrency=2").stdout
    assert "s at 30 ms to the first byte and 90.00 MB/s per connection" in text
    assert "512 nodes that start together: about" in text
    done = CliRunner().invoke(app, ["plan", str(llama), "--link-gbps", "0"])
    assert done.exit_code == 2
    assert "the rate of the link must be a positive number, not 0.0" in done.stderr
