"""Predicted seconds, as ``s3stream plan`` says them, beside what a load from such a store then took.

``python -m tests.benchmarks.predict`` (or ``python -m tests.benchmarks --predict-error``). For each `Point`, the object
server is started with a time to the first byte, a rate of each connection and, for some, a rate of the link that
all connections share; ``s3stream plan`` is told the same numbers, and predicts before anything is loaded. Then
`streamer.load` runs `--rounds` times into the reference engine's Llama, whose parameters were touched before, in a
fresh process after a warm-up; two ranks that share have processes of their own in every round, as in
`tests.benchmarks.sharing`.

What is predicted are the reads of weights. The load has more to do: listing, headers, tracing and planning. The error
is given of the whole load, and of its reads alone, ``predicted / measured - 1`` of the medians: below zero where it
took longer. Where the store is faster than this machine, which the model does not know, the machine decides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.processes import ROOT, Served, emit, measure, object_server, run_row
from tests.benchmarks.ranks import SMALL, run_ranks
from tests.benchmarks.rig import RESULTS, environment, save, write_checkpoint
from tests.benchmarks.sharing import sized_config

MODULE, ROW = "tests.benchmarks.predict", "load"
MIB = 1 << 20
BUFFER_BYTES = 512 * MIB


@dataclass(frozen=True)
class Point:
    """One store, one checkpoint, one way of reading.

    Attributes:
        layers: size of the checkpoint, 126 MB a layer and 131 MB.
        first_byte_ms: milliseconds.
        connection_mbps: megabytes per second.
        link_gbps: gigabits per second of all connections together; None when there is no limit.
        concurrency: of each rank.
        ranks: that share.
    """

    layers: int
    first_byte_ms: float
    connection_mbps: float
    link_gbps: float | None
    concurrency: int
    ranks: int = 1

    def server_options(self) -> list[str]:
        found = [f"--first-byte-seconds={self.first_byte_ms / 1e3}", f"--bytes-per-second={self.connection_mbps * 1e6}"]
        return found + ([f"--link-bytes-per-second={self.link_gbps * 1e9 / 8}"] if self.link_gbps else [])

    def plan_options(self) -> list[str]:
        found = [f"--first-byte-ms={self.first_byte_ms}", f"--connection-mbps={self.connection_mbps}"]
        found += [f"--tp={self.ranks}", f"--option=concurrency={self.concurrency}"]
        found += [f"--option=buffer_bytes={BUFFER_BYTES}"]
        return found + ([f"--link-gbps={self.link_gbps}"] if self.link_gbps else [])


POINTS = (
    Point(2, 30, 90, None, 4),
    Point(2, 30, 20, None, 16),
    Point(2, 200, 90, None, 8),
    Point(8, 30, 90, None, 8),
    Point(8, 100, 50, None, 16),
    Point(8, 30, 90, 4, 32),
    Point(8, 30, 90, None, 32),
    Point(8, 30, 20, None, 16, ranks=2),
)
QUICK_POINTS = (Point(1, 30, 20, None, 16), Point(1, 30, 90, 2, 8))


def load_row(arguments: dict[str, Any]) -> None:
    """Load again and again; say how long each took, and its reads alone."""
    import streamer
    from streamer.reference.parallel import Parallel
    from streamer.report import LoadTimes
    from tests.benchmarks.models import build, check

    options = {
        "endpoint_url": arguments["endpoint"],
        "concurrency": arguments["concurrency"],
        "buffer_bytes": BUFFER_BYTES,
    }
    streamer.load(build(SMALL, Parallel()), "s3://bench/small", options)
    model = build(arguments["config"], Parallel())
    times: list[LoadTimes] = []

    def work() -> int:
        reports = [streamer.load(model, "s3://bench/large", options) for _ in range(arguments["rounds"])]
        times.extend(report.times for report in reports)
        return sum(report.fetched_bytes for report in reports)

    sample = measure(work)
    check(model, Path(arguments["file"]), Parallel())
    emit(
        sample,
        load_seconds=[round(one.total, 4) for one in times],
        read_seconds=[round(one.total - one.headers - one.trace - one.plan, 4) for one in times],
    )


def predict(point: Point, endpoint: str) -> dict[str, Any]:
    """Ask ``s3stream plan``; return its document."""
    command = [sys.executable, "-c", "from streamer.cli import main; main()", "plan", "s3://bench/large"]
    command += ["--json", "--quiet", f"--endpoint-url={endpoint}", *point.plan_options()]
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        environ = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environ, "S3STREAM_CACHE_DIR": folder, "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"s3stream plan ended with {done.returncode}:\n{done.stderr[-3000:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measure_point(point: Point, root: Path, server: Served, rounds: int) -> dict[str, list[float]]:
    """Load as `point` says; return the seconds of each round."""
    file = root / "bench" / "large" / "model.safetensors"
    common: dict[str, Any] = {"endpoint": server.endpoint, "config": sized_config(point.layers), "file": str(file)}
    if point.ranks == 1:
        row = run_row(MODULE, ROW, {**common, "concurrency": point.concurrency, "rounds": rounds})
        return {name: row[name] for name in ("load_seconds", "read_seconds")}
    common |= {"file_bytes": file.stat().st_size, "buffer_bytes": BUFFER_BYTES}
    common["options"] = {"concurrency": point.concurrency}
    found = [run_ranks("share=auto", point.ranks, common, server)["wall_seconds"] for _ in range(rounds)]
    return {"load_seconds": [round(seconds, 4) for seconds in found]}


def run_point(point: Point, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        write_checkpoint(root / "bench" / "large", sized_config(point.layers))
        write_checkpoint(root / "bench" / "small", SMALL)
        with object_server(root, *point.server_options()) as server:
            planned = predict(point, server.endpoint)
            measured = measure_point(point, root, server, rounds)
    return {
        **asdict(point),
        "checkpoint_bytes": planned["checkpoint_bytes"],
        "requests": planned["node_requests"],
        "predicted_seconds": planned["predicted_seconds"],
        **errors(planned["predicted_seconds"], measured),
        "rounds": measured,
    }


def errors(predicted: float, measured: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each kind of seconds, and the relative error of `predicted` to it."""
    found = {}
    for name, seconds in measured.items():
        median = statistics.median(seconds)
        found[f"measured_{name}"] = round(median, 3)
        found[f"relative_error_to_{name}"] = round(predicted / median - 1, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two points, of small checkpoints")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    parser.add_argument("--row", choices=[ROW], help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        load_row(options.arguments)
        return
    found = []
    for point in QUICK_POINTS if options.quick else POINTS:
        found.append(run_point(point, options.rounds))
        print(f"{point}: predicted {found[-1]['predicted_seconds']} s", flush=True)
    document = {
        "what": "seconds that s3stream plan predicts of a simulated store, beside those that a load from it took",
        "environment": environment(),
        "buffer_bytes": BUFFER_BYTES,
        "points": found,
    }
    path = save("predict", document, options.results)
    print(
        "\n| ranks | MB | first byte ms | MB/s each | link Gbit/s | at once | predicted s | load s | error | of reads |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in found:
        reads = row.get("relative_error_to_read_seconds")
        print(
            f"| {row['ranks']} | {row['checkpoint_bytes'] / 1e6:.0f} | {row['first_byte_ms']:g} "
            f"| {row['connection_mbps']:g} | {row['link_gbps'] or 'free'} | {row['concurrency']} "
            f"| {row['predicted_seconds']:.2f} | {row['measured_load_seconds']:.2f} "
            f"| {row['relative_error_to_load_seconds']:+.0%} | {'' if reads is None else f'{reads:+.0%}'} |"
        )
    print(f"\nraw results: {path}")


if __name__ == "__main__":
    main()
