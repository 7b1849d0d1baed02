"""What faults cost: the same load from a store in good health, and from one that breaks in a tenth of its answers.

``python -m tests.benchmarks.faults`` writes a checkpoint, starts both stores in processes of their own, and runs
each row in a fresh process, round by round, so that ratios are taken side by side. Every row compares each
parameter with the file. The broken store draws from every fault that a load survives, at random, another mixture
in each round. Both stores take 30 ms to the first byte and send 90 MB/s per connection. Stalls cost whatever the
idle timeout is, so it is given: a second. The load waits for its unluckiest request, so what faults add hardly
depends on the size of the checkpoint: the ratio falls as that grows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.end_to_end import SMALL, large_config, streamer_row
from tests.benchmarks.processes import STORES, object_server, run_row, store_options
from tests.benchmarks.rig import RESULTS, environment, medians, ratio, save, write_checkpoint

ROWS = ["in good health", "with faults"]
FAULT_RATE = 0.1
LAYERS = 2
RANGE_BYTES = 2 << 20
OPTIONS = {"request_bytes": RANGE_BYTES, "idle_timeout_seconds": 1.0, "min_rate_bytes_per_second": 50_000}


def run(rounds: int, layers: int) -> dict[str, Any]:
    results: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        nbytes = write_checkpoint(root / "bench" / "large", large_config(layers))
        write_checkpoint(root / "bench" / "small", SMALL)
        file = str(root / "bench" / "large" / "model.safetensors")
        for number in range(rounds):
            found: dict[str, dict[str, Any]] = {}
            for row in ROWS if number % 2 == 0 else ROWS[::-1]:
                faults = ["--rate", str(FAULT_RATE if row == "with faults" else 0.0), "--seed", str(number)]
                with object_server(root, *store_options("s3like"), *faults, module="tests.servers.faults") as server:
                    where = {"endpoint": server.endpoint, "file": file}
                    arguments = {**where, "config": large_config(layers), "options": OPTIONS}
                    found[row] = run_row("tests.benchmarks.faults", row, arguments)
            results.append(found)
            print(f"round {number + 1} of {rounds} done", flush=True)
    return {
        "what": "wall time of a load from a store that breaks at random, beside the same load in good health",
        "environment": environment(),
        "checkpoint_bytes": nbytes,
        "fault_rate": FAULT_RATE,
        "store": STORES["s3like"],
        "options": OPTIONS,
        "median_wall_seconds": {row: round(medians(results, row, "wall_seconds"), 3) for row in ROWS},
        "median_retries": {row: medians(results, row, "retries") for row in ROWS},
        "median_requests": {row: medians(results, row, "requests") for row in ROWS},
        "wall_ratio": ratio(results, "with faults", "in good health", "wall_seconds"),
        "cpu_ratio": ratio(results, "with faults", "in good health", "cpu_seconds"),
        "bytes_ratio": ratio(results, "with faults", "in good health", "nbytes"),
        "rounds": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=LAYERS, help="size of the checkpoint, 140 MB a layer")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        streamer_row(options.arguments)
        return
    document = run(options.rounds, options.layers)
    path = save("faults", document, options.results)
    wall, retries = document["median_wall_seconds"], document["median_retries"]
    print(f"\n{document['checkpoint_bytes'] / 1e6:.0f} MB, medians of {options.rounds} rounds\n")
    print("| store | wall s | retries |")
    print("| --- | --- | --- |")
    for row in ROWS:
        print(f"| {row} | {wall[row]:.2f} | {retries[row]:.0f} |")
    print(f"\nwall time ratio: {document['wall_ratio']}\nraw results: {path}")


if __name__ == "__main__":
    main()
