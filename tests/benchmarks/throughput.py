"""What a load gains by finding out how many requests serve best, and by fetching while the trace goes on.

``python -m tests.benchmarks.throughput``. Each pair is the same load with and without, side by side in every round,
each in a fresh process; every parameter is compared with the file, and has memory that was touched before the clock
starts.

- ``more requests``: a store that takes 30 ms to the first byte and sends 20 MB/s per connection. Without, 16 requests
  are in flight throughout (``max_concurrency=16``).
- ``while tracing``: 30,000 small tensors behind a link of 2 Gbit/s. Without, nothing of the weights is fetched before
  all of them have been traced (``overlap_tensors=0``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.end_to_end import SMALL, large_config, streamer_row
from tests.benchmarks.processes import object_server, run_row
from tests.benchmarks.rig import RESULTS, environment, medians, ratio, save, spread, write_checkpoint
from tests.benchmarks.scale import thin_config

MODULE, ROW = "tests.benchmarks.throughput", "load"
MIB = 1 << 20
WITH, WITHOUT = "with", "without"


@dataclass(frozen=True)
class Pair:
    """A load from a store, with and without something.

    Attributes:
        store: options of the object server.
        options: of both loads; `without` come on top for the one.
    """

    config: dict[str, Any]
    store: tuple[str, ...]
    without: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


def pairs(layers: int, tensors: int) -> dict[str, Pair]:
    slow = ("--first-byte-seconds=0.03", "--bytes-per-second=20e6")
    link = ("--first-byte-seconds=0.03", "--bytes-per-second=90e6", "--link-bytes-per-second=250e6")
    return {
        "more requests": Pair(
            large_config(layers), slow, {"max_concurrency": 16}, {"concurrency": 16, "request_bytes": 2 * MIB}
        ),
        "while tracing": Pair(thin_config(tensors), link, {"overlap_tensors": 0}),
    }


def run(rounds: int, layers: int, tensors: int) -> dict[str, Any]:
    return {
        "what": "wall time of loads with and without what the client does for throughput, beside each other",
        "environment": environment(),
        "pairs": {name: run_pair(pair, rounds) for name, pair in pairs(layers, tensors).items()},
    }


def run_pair(pair: Pair, rounds: int) -> dict[str, Any]:
    results: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        nbytes = write_checkpoint(root / "bench" / "large", pair.config)
        write_checkpoint(root / "bench" / "small", SMALL)
        with object_server(root, *pair.store) as server:
            for number in range(rounds):
                found = {}
                for row in (WITH, WITHOUT) if number % 2 == 0 else (WITHOUT, WITH):
                    arguments = {
                        "endpoint": server.endpoint,
                        "config": pair.config,
                        "file": str(root / "bench" / "large" / "model.safetensors"),
                        "options": {**pair.options, **(pair.without if row == WITHOUT else {})},
                    }
                    found[row] = run_row(MODULE, ROW, arguments, server=server)
                results.append(found)
                print(f"round {number + 1} of {rounds} done", flush=True)
    return {
        "checkpoint_bytes": nbytes,
        "store": pair.store,
        "options": pair.options,
        "without": pair.without,
        "median_wall_seconds": {row: round(medians(results, row, "wall_seconds"), 3) for row in (WITH, WITHOUT)},
        "median_cpu_seconds": {row: round(medians(results, row, "cpu_seconds"), 3) for row in (WITH, WITHOUT)},
        "median_peak_extra_mib": {
            row: round(medians(results, row, "peak_extra_bytes") / MIB) for row in (WITH, WITHOUT)
        },
        "wall_ratio": ratio(results, WITH, WITHOUT, "wall_seconds"),
        "rounds": results,
    }


def show(found: Mapping[str, Any]) -> None:
    print("\n| pair | with, s | without, s | ratio |\n| --- | --- | --- | --- |")
    for name, pair in found["pairs"].items():
        wall = pair["median_wall_seconds"]
        print(f"| {name} | {wall[WITH]:.2f} | {wall[WITHOUT]:.2f} | {spread(pair['wall_ratio'])} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=14, help="of the first pair's checkpoint, 140 MB each")
    parser.add_argument("--tensors", type=int, default=30_000, help="of the second pair's")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    parser.add_argument("--row", choices=[ROW], help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        streamer_row(options.arguments)
        return
    document = run(options.rounds, options.layers, options.tensors)
    path = save("throughput", document, options.results)
    show(document)
    print(f"\nraw results: {path}")


if __name__ == "__main__":
    main()
