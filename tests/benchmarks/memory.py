"""Peak memory above the parameters, with a buffer cap of half the largest tensor.

``python -m tests.benchmarks.memory``. Each row is a fresh process whose parameters exist and have been
touched before the load; what is reported is the highest resident size during the load (VmHWM, reset at
its start) less the resident size before it. Rows:

- ``in place``: every tensor whole, same dtype: received straight into the parameters.
- ``rank 1 of 2``: row-parallel slices are staged as whole rows and copied.
- ``cast to float32``: every byte is staged, because the parameters have another dtype.
- ``cast, larger than the model``: the same with a cap larger than the checkpoint; it is not allocated.
- ``eager, rank 1 of 2``: whole tensors of their own, for comparison; the largest is beyond the cap alone.

Two ranks at once have a checkpoint of their own, whose largest tensor is row-parallel: both need a part of every row,
so that all of it goes through the memory that they share, which is half as large. Theirs is the peak of the node, as
`tests.benchmarks.sharing` measures it, shared memory counted once:

- ``2 ranks that share``, ``2 ranks that share, cast to float32``: the cap is for both together.
- ``2 ranks, share=off``: each has the cap for itself.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.processes import emit, measure, object_server, run_row
from tests.benchmarks.ranks import SMALL, run_ranks
from tests.benchmarks.rig import RESULTS, environment, llama_config, llama_shapes, save, write_checkpoint

MIB = 1 << 20
ALLOWANCE_BYTES = 200 * 10**6

ROWS: dict[str, dict[str, Any]] = {
    "in place": {},
    "rank 1 of 2": {"rank": 1, "size": 2},
    "cast to float32": {"dtype": "float32"},
    "cast, larger than the model": {"dtype": "float32", "buffer_bytes": 64 << 30},
    "eager, rank 1 of 2": {"rank": 1, "size": 2, "mode": "eager"},
}
#: By row of this benchmark, the row of `tests.benchmarks.ranks` and the parameters' dtype.
SHARED_ROWS = {
    "2 ranks that share": ("share=auto", "bfloat16"),
    "2 ranks that share, cast to float32": ("share=auto", "float32"),
    "2 ranks, share=off": ("share=off", "bfloat16"),
}


def config_of(largest: int) -> dict[str, Any]:
    """Return a model whose embeddings are its largest tensor, about `largest` bytes."""
    return llama_config(6, hidden=2048, wide=8192, heads=16, kv_heads=4, vocabulary=largest // 4096)


def row_parallel_config_of(largest: int) -> dict[str, Any]:
    """Return a model whose ``down_proj`` is as large as any of its tensors, about `largest` bytes."""
    return llama_config(1, hidden=2048, wide=largest // 8192 * 2, heads=16, kv_heads=4, vocabulary=4096)


def largest_bytes(config: Mapping[str, Any]) -> int:
    return max(2 * math.prod(shape) for shape in llama_shapes(config).values())


def run_one(arguments: dict[str, Any]) -> None:
    import streamer
    from streamer.reference.parallel import Parallel
    from tests.benchmarks.models import build

    config = {**arguments["config"], "torch_dtype": arguments.get("dtype", "bfloat16")}
    options = {
        "endpoint_url": arguments["endpoint"],
        "buffer_bytes": arguments["buffer_bytes"],
        "mode": arguments.get("mode", "trace"),
    }
    model = build(config, Parallel(arguments.get("rank", 0), arguments.get("size", 1)))
    # Imports and the S3 client's own memory, which is not about the size of the model.
    small = build({**SMALL, "torch_dtype": config["torch_dtype"]}, Parallel())
    streamer.load(small, "s3://bench/small", options)
    del small
    reports = []

    def work() -> int:
        reports.append(streamer.load(model, "s3://bench/large", options))
        return reports[0].fetched_bytes

    sample = measure(work)
    emit(sample, peak_buffer_bytes=reports[0].peak_buffer_bytes, requests=reports[0].requests)


def run(largest: int, only: Sequence[str]) -> dict[str, Any]:
    config = config_of(largest)
    cap = largest_bytes(config) // 2
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        nbytes = write_checkpoint(root / "bench" / "large", config)
        write_checkpoint(root / "bench" / "small", SMALL)
        with object_server(root) as server:
            common = {"endpoint": server.endpoint, "config": config, "buffer_bytes": cap}
            rows = {
                row: run_row("tests.benchmarks.memory", row, {**common, **arguments})
                for row, arguments in ROWS.items()
                if row in only
            }
    return {
        "what": "peak resident memory above the parameters during a load",
        "environment": environment(),
        "checkpoint_bytes": nbytes,
        "largest_tensor_bytes": largest_bytes(config),
        "cap_bytes": cap,
        "limit_bytes": cap + ALLOWANCE_BYTES,
        "rows": rows,
        "ranks": run_shared(largest, only),
    }


def run_shared(largest: int, only: Sequence[str]) -> dict[str, Any]:
    """Measure the rows of two ranks, with a checkpoint of their own."""
    config = row_parallel_config_of(largest)
    cap = largest_bytes(config) // 2
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        write_checkpoint(root / "bench" / "large", config)
        write_checkpoint(root / "bench" / "small", SMALL)
        file = root / "bench" / "large" / "model.safetensors"
        common = {"file": str(file), "file_bytes": file.stat().st_size, "buffer_bytes": cap}
        rows = {}
        with object_server(root) as server:
            for row in (row for row in SHARED_ROWS if row in only):
                way, dtype = SHARED_ROWS[row]
                arguments = {**common, "config": {**config, "torch_dtype": dtype}}
                rows[row] = run_ranks(way, 2, arguments, server, samples_memory=True)
                rows[row]["peak_extra_bytes"] = rows[row].pop("peak_node_bytes")
    return {
        "checkpoint_bytes": common["file_bytes"],
        "largest_tensor_bytes": largest_bytes(config),
        "cap_bytes": cap,
        "limit_bytes": cap + ALLOWANCE_BYTES,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest-mib", type=int, default=500, help="about how large the largest tensor is")
    names = [*ROWS, *SHARED_ROWS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help="; ".join(names))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        run_one(options.arguments)
        return
    document = run(options.largest_mib * MIB, options.only)
    path = save("memory", document, options.results)
    for found in (document, document["ranks"]):
        print(
            f"\ncheckpoint {found['checkpoint_bytes'] / MIB:.0f} MiB, largest tensor "
            f"{found['largest_tensor_bytes'] / MIB:.0f} MiB, cap {found['cap_bytes'] / MIB:.0f} MiB, "
            f"limit (cap + 200 MB) {found['limit_bytes'] / MIB:.0f} MiB\n"
        )
        print("| load | peak above the parameters, MiB | of it buffers, MiB |\n| --- | --- | --- |")
        for row, measured in found["rows"].items():
            buffers = measured.get("peak_buffer_bytes", measured.get("arena_bytes"))
            print(f"| {row} | {measured['peak_extra_bytes'] / MIB:.0f} | {buffers / MIB:.0f} |")
    print(f"\nraw results: {path}")


if __name__ == "__main__":
    main()
