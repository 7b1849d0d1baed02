"""Peak memory above the parameters, with a buffer cap of half the largest tensor.

``python -m tests.benchmarks.memory``. Each row is a fresh process whose parameters exist and have been
touched before the load; what is reported is the highest resident size during the load (VmHWM, reset at
its start) less the resident size before it. Rows:

- ``in place``: every tensor whole, same dtype: received straight into the parameters.
- ``rank 1 of 2``: row-parallel slices are staged as whole rows and copied.
- ``cast to float32``: every byte is staged, because the parameters have another dtype.
- ``cast, larger than the model``: the same with a cap larger than the checkpoint; it is not allocated.
- ``eager, rank 1 of 2``: whole tensors of their own, for comparison; the largest is beyond the cap alone.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.processes import emit, measure, object_server, run_row
from tests.benchmarks.rig import environment, llama_config, llama_shapes, save, write_checkpoint

MIB = 1 << 20
CONFIG = llama_config(layers=6, hidden=2048, wide=8192, heads=16, kv_heads=4, vocabulary=128000)
SMALL = llama_config(layers=1, hidden=128, wide=256, heads=4, kv_heads=2, vocabulary=256)
LARGEST_BYTES = max(2 * math.prod(shape) for shape in llama_shapes(CONFIG).values())
CAP_BYTES = LARGEST_BYTES // 2
ALLOWANCE_BYTES = 200 * 10**6

ROWS: dict[str, dict[str, Any]] = {
    "in place": {},
    "rank 1 of 2": {"rank": 1, "size": 2},
    "cast to float32": {"dtype": "float32"},
    "cast, larger than the model": {"dtype": "float32", "buffer_bytes": 64 << 30},
    "eager, rank 1 of 2": {"rank": 1, "size": 2, "mode": "eager"},
}


def run_one(arguments: dict[str, Any]) -> None:
    import streamer
    from streamer.reference.parallel import Parallel
    from tests.benchmarks.models import build

    config = {**CONFIG, "torch_dtype": arguments.get("dtype", "bfloat16")}
    options = {
        "endpoint_url": arguments["endpoint"],
        "buffer_bytes": arguments.get("buffer_bytes", CAP_BYTES),
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


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        nbytes = write_checkpoint(root / "bench" / "large", CONFIG)
        write_checkpoint(root / "bench" / "small", SMALL)
        with object_server(root) as server:
            rows = {
                row: run_row("tests.benchmarks.memory", row, {"endpoint": server.endpoint, **arguments})
                for row, arguments in ROWS.items()
            }
    return {
        "what": "peak resident memory above the parameters during a load",
        "environment": environment(),
        "checkpoint_bytes": nbytes,
        "largest_tensor_bytes": LARGEST_BYTES,
        "cap_bytes": CAP_BYTES,
        "limit_bytes": CAP_BYTES + ALLOWANCE_BYTES,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        run_one(options.arguments)
        return
    document = run()
    path = save("memory", document)
    print(
        f"checkpoint {document['checkpoint_bytes'] / MIB:.0f} MiB, largest tensor {LARGEST_BYTES / MIB:.0f} MiB, "
        f"cap {CAP_BYTES / MIB:.0f} MiB, limit (cap + 200 MB) {document['limit_bytes'] / MIB:.0f} MiB\n"
    )
    print("| load | peak above the parameters, MiB | of it staging buffers, MiB |")
    print("| --- | --- | --- |")
    for row, found in document["rows"].items():
        print(f"| {row} | {found['peak_extra_bytes'] / MIB:.0f} | {found['peak_buffer_bytes'] / MIB:.0f} |")
    print(f"\nraw results: {path}")


if __name__ == "__main__":
    main()
