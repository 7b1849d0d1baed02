"""Ranks of one machine loading one checkpoint: what is fetched, how long it takes, what memory it needs.

``python -m tests.benchmarks.sharing`` writes a Llama checkpoint and starts the object server in another process: plain
HTTP as fast as it goes, and ``s3like``, with 30 ms to the first byte and 90 MB/s per connection. For each number of
ranks, each row starts that many processes in a gloo group, on all processors but the server's, round by round, so that
ratios are taken side by side. Every rank builds its model, touches its parameters and loads a small checkpoint first.
The clock runs from a barrier after that until the slowest rank has its own slices in its parameters, which are then
compared with the file. Requests and bytes are counted by the server. Rows:

- ``share=auto``, ``share=off``: `streamer.load` with a group, 512 MiB of `buffer_bytes`, which
  all ranks have together when they share, and each has when they do not.
- ``Run:ai``: every rank streams all tensors and takes its slices, as vLLM does by default; ``Run:ai, distributed``:
  each reads a part and broadcasts it (``RUNAI_STREAMER_DIST=1``, for it does so over nccl only, unless told).
  ``limited``: given as much memory as sharing ranks have, for the node in distributed mode, else for each rank a part.

Memory is measured in a round of its own, for sampling takes processor time from the ranks. ``peak_node_bytes``: the
highest sum of the ranks' proportional set sizes, which count shared memory once, less that before the load; files are
left out, and a peak between two samples is missed. ``peak_resident_bytes`` misses none: the sum of what each rank's
highest resident size was beyond that before the load. It counts shared memory once per rank.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import runai
from tests.benchmarks.processes import STORES, object_server, require, store_options
from tests.benchmarks.ranks import BASE, ROWS, SMALL, run_ranks
from tests.benchmarks.rig import (
    GIB,
    RESULTS,
    environment,
    llama_config,
    medians,
    ratio,
    save,
    spread,
    write_checkpoint,
)

MIB = 1 << 20
LAYERS = 16  # 2.1 GiB
BUFFER_BYTES = 512 * MIB


def sized_config(layers: int) -> dict[str, Any]:
    return llama_config(layers=layers, hidden=2048, wide=8192, heads=16, kv_heads=8, vocabulary=16000)


def is_of(row: str, size: int, runai_sizes: Sequence[int]) -> bool:
    """Whether `row` is measured with `size` ranks: there is nothing to distribute over one."""
    way = ROWS[row]
    return bool(way.share) or (size in runai_sizes and (size > 1 or not way.is_distributed))


def run(
    rows: Sequence[str],
    sizes: Sequence[int],
    stores: Sequence[str],
    *,
    runai_sizes: Sequence[int],
    rounds: int,
    layers: int,
) -> dict[str, Any]:
    config, settings = sized_config(layers), {}
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        write_checkpoint(root / "bench" / "large", config)
        write_checkpoint(root / "bench" / "small", SMALL)
        file = root / "bench" / "large" / "model.safetensors"
        arguments = {
            "config": config,
            "file": str(file),
            "file_bytes": file.stat().st_size,
            "buffer_bytes": BUFFER_BYTES,
        }
        for store in stores:
            with object_server(root, *store_options(store)) as server:
                for size in sizes:
                    chosen = [row for row in rows if is_of(row, size, runai_sizes)]
                    results = []
                    for number in range(rounds):
                        order = chosen if number % 2 == 0 else chosen[::-1]
                        results.append({row: run_ranks(row, size, arguments, server) for row in order})
                        print(f"{store}, {size} ranks: round {number + 1} of {rounds} done", flush=True)
                    memory = {row: run_ranks(row, size, arguments, server, samples_memory=True) for row in chosen}
                    settings[f"{store}, {size} ranks"] = _summary(chosen, results, memory)
    packages = runai.PACKAGES if any(not ROWS[row].share for row in rows) else ()
    return {
        "what": "ranks of one machine loading one checkpoint over loopback",
        "environment": environment(*packages),
        "checkpoint_bytes": arguments["file_bytes"],
        "buffer_bytes": BUFFER_BYTES,
        "stores": {store: STORES[store] for store in stores},
        "settings": settings,
    }


def _summary(
    rows: Sequence[str], results: Sequence[Mapping[str, Any]], memory: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "median_wall_seconds": {row: round(medians(results, row, "wall_seconds"), 3) for row in rows},
        "median_cpu_seconds": {row: round(medians(results, row, "cpu_seconds"), 3) for row in rows},
        "median_served_ratio": {row: round(medians(results, row, "served_ratio"), 4) for row in rows},
        "median_requests": {row: medians(results, row, "requests") for row in rows},
        "peak_node_mib": {row: round(memory[row]["peak_node_bytes"] / MIB) for row in rows},
        "peak_resident_mib": {row: round(memory[row]["peak_resident_bytes"] / MIB) for row in rows},
        "wall_ratio_to_share_auto": {row: ratio(results, row, BASE, "wall_seconds") for row in rows},
        "cpu_ratio_to_share_auto": {row: ratio(results, row, BASE, "cpu_seconds") for row in rows},
        "served_ratio_to_share_auto": {row: ratio(results, row, BASE, "served_bytes") for row in rows},
        "rounds": results,
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="size of the checkpoint, 126 MB a layer")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8], metavar="RANKS")
    parser.add_argument("--runai-sizes", type=int, nargs="+", default=[2], metavar="RANKS", help="with Run:ai's rows")
    parser.add_argument("--stores", nargs="+", choices=list(STORES), default=list(STORES))
    parser.add_argument(
        "--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="; ".join(ROWS)
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    options = parser.parse_args()
    rows = [row for row in ROWS if row == BASE or row in options.only]
    if any(not ROWS[row].share for row in rows):
        require(runai.PACKAGES, "Run:ai's rows")
    document = run(
        rows,
        options.sizes,
        options.stores,
        runai_sizes=options.runai_sizes,
        rounds=options.rounds,
        layers=options.layers,
    )
    path = save("sharing", document, options.results)
    print(f"\n{document['checkpoint_bytes'] / GIB:.2f} GiB, medians of {options.rounds} rounds; ratios to {BASE}\n")
    print("| ranks load | wall s | ratio (min-max) | CPU s | ratio (min-max) | bytes served | requests | node MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, found in document["settings"].items():
        for row in found["median_wall_seconds"]:
            print(
                f"| {name}: {row} | {found['median_wall_seconds'][row]:.2f} "
                f"| {spread(found['wall_ratio_to_share_auto'][row])} | {found['median_cpu_seconds'][row]:.2f} "
                f"| {spread(found['cpu_ratio_to_share_auto'][row])} | {found['median_served_ratio'][row]:.3f} "
                f"| {found['median_requests'][row]:.0f} | {found['peak_node_mib'][row]} |"
            )
    print(f"\nbuffer_bytes: {BUFFER_BYTES // MIB} MiB; raw results: {path}")


if __name__ == "__main__":
    main()
