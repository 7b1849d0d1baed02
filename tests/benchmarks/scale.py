"""How a load grows: with the number of tensors, and with bytes.

``python -m tests.benchmarks.scale``. Sizes are reached by the number of layers, so that tensors and requests are alike
at all of them; each row is a fresh process, round by round. Exponents are fitted to the medians: 1 is linear.

By tensors: checkpoints without a byte of weights (holes in files), 9 tensors a layer, in files of about 550. What is
timed, in CPU seconds: reading the headers from the object server, and tracing the reference engine's loading code and
planning the reads, as ``s3stream plan`` does. `tests.benchmarks.trace_cost` has the same of vLLM's code.

By bytes: checkpoints of noise over plain HTTP on loopback, `streamer.load` into the reference engine's Llama, whose
parameters were touched before the clock starts; every parameter is compared with the file. Two rows, whole and rank
1 of 2; `buffer_bytes` is 256 MiB.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.end_to_end import SMALL, streamer_row
from tests.benchmarks.processes import Served, emit, measure, object_server, run_row
from tests.benchmarks.rig import (
    GIB,
    RESULTS,
    environment,
    growth_exponent,
    llama_config,
    llama_shapes,
    medians,
    save,
    write_checkpoint,
)
from tests.sparse import Tensor, write_sparse

MODULE = "tests.benchmarks.scale"
MIB = 1 << 20
BUFFER_BYTES = 256 * MIB
TENSORS = (1_000, 10_000, 90_000)
MIBS = (64, 256, 1024, 4096)
_TENSORS_PER_LAYER, _TENSORS_PER_FILE = 9, 550

#: By row: what `streamer_row` gets.
BYTES_ROWS: dict[str, dict[str, Any]] = {"whole": {}, "rank 1 of 2": {"rank": 1, "size": 2}}
TRACE_ROW = "headers, trace and plan"
GROWING = ("cpu_seconds", "wall_seconds", "requests")


def thin_config(tensors: int) -> dict[str, Any]:
    """Return a model of about so many tensors, the largest of which has 64 KiB."""
    return llama_config(tensors // _TENSORS_PER_LAYER, hidden=128, wide=256, heads=4, kv_heads=2, vocabulary=256)


def thick_config(nbytes: int) -> dict[str, Any]:
    """Return a model of about so many bytes: 22 MiB a layer, and 8 MiB of embeddings."""
    layers = max(1, round((nbytes / MIB - 8) / 21.5))
    return llama_config(layers, hidden=1024, wide=2816, heads=16, kv_heads=4, vocabulary=2048)


def tensors_of(config: Mapping[str, Any]) -> Iterator[Tensor]:
    for name, shape in llama_shapes(config).items():
        yield name, "BF16", tuple(shape)


def trace_row(arguments: dict[str, Any]) -> None:
    """Measure headers, and trace with plan, one after the other in one process."""
    from streamer.checkpoint.checkpoint import Checkpoint
    from streamer.config import StreamConfig
    from streamer.dryrun import DryRun, dry_run
    from streamer.engines import ParallelLayout, RankModel
    from streamer.fetch.engine import FetchEngine
    from streamer.reference.engine import ReferenceEngine
    from streamer.sources import open_source
    from tests.benchmarks.trace_cost import cpu_seconds

    config = StreamConfig().replace(endpoint_url=arguments["endpoint"])
    opened: list[Checkpoint] = []
    planned: list[DryRun] = []

    def read_headers(name: str) -> None:
        with FetchEngine(open_source(f"s3://bench/{name}", config), config) as engine:
            opened.append(engine.open_checkpoint().checkpoint)

    def plan(target: RankModel) -> None:
        planned.append(dry_run(target, opened[-1], config))

    folder, layout = Path(arguments["folder"]), ParallelLayout(tensor=2)
    read_headers("small")
    plan(ReferenceEngine().build(folder.with_name("small"), layout, 1))
    target = ReferenceEngine().build(folder, layout, 1)
    seconds = {}

    def work() -> int:
        seconds["headers"] = cpu_seconds(lambda: read_headers(arguments["name"]))
        seconds["trace and plan"] = cpu_seconds(lambda: plan(target))
        return opened[-1].nbytes

    sample = measure(work)
    assert len(planned[-1].copies) == len(opened[-1].tensors), "the reference engine takes a part of every tensor"
    emit(sample, tensors=len(opened[-1].tensors), files=len(opened[-1].files), seconds=seconds)


def run_tensors(sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        write_checkpoint(root / "bench" / "small", SMALL)
        for size in sizes:
            config = thin_config(size)
            nbytes = sum(2 * _product(shape) for _, _, shape in tensors_of(config))
            shard_bytes = nbytes * _TENSORS_PER_FILE // size
            write_sparse(root / "bench" / f"tensors-{size}", tensors_of(config), config, shard_bytes=shard_bytes)
        results = []
        with object_server(root) as server:
            for number in range(rounds):
                found = {}
                for size in _turned(sizes, number):
                    name = f"tensors-{size}"
                    arguments = {"name": name, "folder": str(root / "bench" / name), "endpoint": server.endpoint}
                    found[str(size)] = run_row(MODULE, TRACE_ROW, arguments, server=server)
                results.append(found)
                print(f"by tensors: round {number + 1} of {rounds} done", flush=True)
    return summary_of_tensors(results)


def summary_of_tensors(results: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Put the rounds together: medians by size, and how they grow."""
    parts = ("headers", "trace and plan")
    flat = [{size: {**row, **row["seconds"]} for size, row in found.items()} for found in results]
    sizes = [
        {
            "tensors": results[0][size]["tensors"],
            "files": results[0][size]["files"],
            **{f"{part}_cpu_seconds".replace(" ", "_"): round(medians(flat, size, part), 4) for part in parts},
            "requests": medians(flat, size, "requests"),
            "peak_extra_mib": round(medians(flat, size, "peak_extra_bytes") / MIB, 1),
        }
        for size in sorted(results[0], key=int)
    ]
    fields = [name for name in sizes[0] if name.endswith("_seconds")]
    exponents = {name: growth_exponent((row["tensors"], row[name]) for row in sizes) for name in fields}
    return {"sizes": sizes, "growth_exponents": exponents if len(sizes) > 1 else {}, "rounds": list(results)}


def run_bytes(mibs: Sequence[int], rounds: int) -> dict[str, Any]:
    results: list[dict[str, dict[str, Any]]] = [{} for _ in range(rounds)]
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        for mib in mibs:
            config = thick_config(mib * MIB)
            write_checkpoint(root / str(mib) / "bench" / "large", config)
            write_checkpoint(root / str(mib) / "bench" / "small", SMALL)
        for number in range(rounds):
            for mib in _turned(mibs, number):
                with object_server(root / str(mib)) as server:
                    results[number] |= _load_all(root / str(mib), mib, server, number)
            print(f"by bytes: round {number + 1} of {rounds} done", flush=True)
    return summary_of_bytes(mibs, results)


def _load_all(root: Path, mib: int, server: Served, number: int) -> dict[str, dict[str, Any]]:
    arguments = {
        "endpoint": server.endpoint,
        "config": thick_config(mib * MIB),
        "file": str(root / "bench" / "large" / "model.safetensors"),
        "options": {"buffer_bytes": BUFFER_BYTES},
    }
    return {
        f"{mib} MiB, {row}": run_row(MODULE, row, arguments, server=server) for row in _turned(list(BYTES_ROWS), number)
    }


def summary_of_bytes(mibs: Sequence[int], results: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Put the rounds together: medians by row and size, and how they grow with the bytes that were fetched."""
    rows: dict[str, Any] = {}
    for row in BYTES_ROWS:
        sizes = []
        for mib in mibs:
            label = f"{mib} MiB, {row}"
            sizes.append(
                {
                    "fetched_bytes": int(medians(results, label, "nbytes")),
                    "cpu_seconds": round(medians(results, label, "cpu_seconds"), 4),
                    "wall_seconds": round(medians(results, label, "wall_seconds"), 4),
                    "requests": medians(results, label, "requests"),
                    "peak_extra_mib": round(medians(results, label, "peak_extra_bytes") / MIB, 1),
                }
            )
        exponents = {name: growth_exponent((size["fetched_bytes"], size[name]) for size in sizes) for name in GROWING}
        rows[row] = {"sizes": sizes, "growth_exponents": exponents if len(sizes) > 1 else {}}
    return {"rows": rows, "rounds": list(results)}


def _turned(items: Sequence[Any], number: int) -> Sequence[Any]:
    return items if number % 2 == 0 else items[::-1]


def _product(shape: Sequence[int]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensors", type=int, nargs="+", default=TENSORS)
    parser.add_argument("--mib", type=int, nargs="+", default=MIBS, help="sizes; the memory needed is three times that")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    parser.add_argument("--row", choices=[TRACE_ROW, *BYTES_ROWS], help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row == TRACE_ROW:
        trace_row(options.arguments)
        return
    if options.row:
        streamer_row(options.arguments, **BYTES_ROWS[options.row])
        return
    by_tensors = run_tensors(options.tensors, options.rounds)
    by_bytes = run_bytes(options.mib, options.rounds)
    document = {
        "what": "how headers, trace and plan grow with tensors, and a load with bytes",
        "environment": environment(),
        "buffer_bytes": BUFFER_BYTES,
        "destinations": "touched before the clock starts",
        "by_tensors": by_tensors,
        "by_bytes": by_bytes,
    }
    path = save("scale", document, options.results)
    print("\n| tensors | files | headers, CPU s | trace and plan, CPU s |\n| --- | --- | --- | --- |")
    for size in by_tensors["sizes"]:
        headers, planned = size["headers_cpu_seconds"], size["trace_and_plan_cpu_seconds"]
        print(f"| {size['tensors']} | {size['files']} | {headers:.3f} | {planned:.3f} |")
    print(f"\ngrowth exponents: {by_tensors['growth_exponents']}\n")
    print("| load | GiB fetched | CPU s | wall s | requests | extra MiB |\n| --- | --- | --- | --- | --- | --- |")
    for row, found in by_bytes["rows"].items():
        for size in found["sizes"]:
            print(
                f"| {row} | {size['fetched_bytes'] / GIB:.2f} | {size['cpu_seconds']:.2f} | {size['wall_seconds']:.2f} "
                f"| {size['requests']:.0f} | {size['peak_extra_mib']:.0f} |"
            )
        print(f"| {row}: growth exponents {found['growth_exponents']} |")
    print(f"\nraw results: {path}")


if __name__ == "__main__":
    main()
