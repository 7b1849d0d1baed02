"""From the object server into parameters: client CPU per GiB, wall time, memory.

``python -m tests.benchmarks.end_to_end`` writes a checkpoint, starts the object server in another
process, and runs each row in a fresh process, round by round, so that ratios are taken side by side.
Every row moves the same bytes into memory that was touched before the clock starts, after a warm-up
that loads a small checkpoint (imports and client set-up are paid there). Rows:

- ``s3stream``: `streamer.load` into the reference engine's Llama, traced, everything included.
- ``s3stream, rank 1 of 2``: the same for one rank; its row-parallel slices are staged and copied.
- ``bare protocol``: an asyncio.BufferedProtocol that does nothing but ranged GETs into memory.
- ``aiobotocore read()``: ``get_object`` and ``await body.read()``, copied into memory.
- ``s3stream, transport=sdk``: as the first, bodies through aiobotocore under our checks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.clients import CONCURRENCY, RANGE_BYTES, aiobotocore, bare, flat_row
from tests.benchmarks.processes import emit, measure, object_server, run_row
from tests.benchmarks.rig import (
    GIB,
    RESULTS,
    environment,
    llama_config,
    medians,
    ratio,
    save,
    write_checkpoint,
)

LAYERS = 44  # 6 GiB; the machine needs three times that, most of it for checking the result


def large_config(layers: int) -> dict[str, Any]:
    return llama_config(layers=layers, hidden=2560, wide=6912, heads=20, kv_heads=4, vocabulary=32000)


SMALL = llama_config(layers=1, hidden=128, wide=256, heads=4, kv_heads=2, vocabulary=256)

ROWS = ["s3stream", "s3stream, rank 1 of 2", "bare protocol", "aiobotocore read()", "s3stream, transport=sdk"]


def streamer_row(arguments: dict[str, Any], *, transport: str = "native", rank: int = 0, size: int = 1) -> None:
    import streamer
    from streamer.reference.parallel import Parallel
    from tests.benchmarks.models import build, check

    options = {
        "endpoint_url": arguments["endpoint"],
        "transport": transport,
        "concurrency": CONCURRENCY,
        "request_bytes": RANGE_BYTES,
        **arguments.get("options", {}),
    }
    parallel = Parallel(rank, size)
    streamer.load(build(SMALL, parallel), "s3://bench/small", options)
    model = build(arguments["config"], parallel)
    reports = []

    def work() -> int:
        reports.append(streamer.load(model, "s3://bench/large", options))
        return reports[0].fetched_bytes

    sample = measure(work)
    report = reports[0]
    check(model, Path(arguments["file"]), parallel)
    emit(
        sample,
        requests=report.requests,
        retries=report.retries,
        needed_bytes=report.needed_bytes,
        peak_buffer_bytes=report.peak_buffer_bytes,
        times=report.to_dict()["times"],
    )


def run(rounds: int, layers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        nbytes = write_checkpoint(root / "bench" / "large", large_config(layers))
        write_checkpoint(root / "bench" / "small", SMALL)
        results: list[dict[str, dict[str, Any]]] = []
        with object_server(root) as server:
            file = str(root / "bench" / "large" / "model.safetensors")
            arguments = {"endpoint": server.endpoint, "config": large_config(layers), "file": file}
            for number in range(rounds):
                order = ROWS if number % 2 == 0 else ROWS[::-1]
                results.append({row: run_row("tests.benchmarks.end_to_end", row, arguments) for row in order})
                print(f"round {number + 1} of {rounds} done", flush=True)
    return {
        "what": "client CPU and wall time from the object server into parameters, plain HTTP on loopback",
        "environment": environment(),
        "checkpoint_bytes": nbytes,
        "range_bytes": RANGE_BYTES,
        "concurrency": CONCURRENCY,
        "median_cpu_seconds_per_gib": {row: round(medians(results, row, "cpu_per_gib"), 3) for row in ROWS},
        "median_wall_seconds": {row: round(medians(results, row, "wall_seconds"), 3) for row in ROWS},
        "median_peak_extra_mib": {row: round(medians(results, row, "peak_extra_bytes") / (1 << 20)) for row in ROWS},
        "cpu_ratio_to_bare_protocol": {row: ratio(results, row, "bare protocol", "cpu_per_gib") for row in ROWS},
        "cpu_ratio_to_aiobotocore_read": {
            row: ratio(results, row, "aiobotocore read()", "cpu_per_gib") for row in ROWS
        },
        "rounds": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="size of the checkpoint, 140 MB a layer")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows: dict[str, Callable[[dict[str, Any]], None]] = {
        "s3stream": streamer_row,
        "s3stream, rank 1 of 2": lambda arguments: streamer_row(arguments, rank=1, size=2),
        "bare protocol": lambda arguments: flat_row(arguments, bare),
        "aiobotocore read()": lambda arguments: flat_row(arguments, aiobotocore),
        "s3stream, transport=sdk": lambda arguments: streamer_row(arguments, transport="sdk"),
    }
    if options.row:
        rows[options.row](options.arguments)
        return
    document = run(options.rounds, options.layers)
    path = save("end_to_end", document, options.results)
    print(f"\n{document['checkpoint_bytes'] / GIB:.2f} GiB, medians of {options.rounds} rounds\n")
    print("| client | CPU s/GiB | to bare protocol | to aiobotocore read() | wall s | extra MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in ROWS:
        print(
            f"| {row} | {document['median_cpu_seconds_per_gib'][row]:.2f} "
            f"| {document['cpu_ratio_to_bare_protocol'][row]['median']:.2f} "
            f"| {document['cpu_ratio_to_aiobotocore_read'][row]['median']:.2f} "
            f"| {document['median_wall_seconds'][row]:.2f} | {document['median_peak_extra_mib'][row]} |"
        )
    print(f"\nraw results: {path}")


if __name__ == "__main__":
    main()
