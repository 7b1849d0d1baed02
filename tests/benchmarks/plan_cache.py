"""What the plan cache saves a restart and costs the load before it, in vLLM, for DeepSeek-V3 at TP=8, rank 3.

``python -m tests.benchmarks.plan_cache`` in an environment with vLLM loads a checkpoint of local files with the real
names, layers and experts, whose sizes are made so small that the parameters have memory: the cache refuses those on
meta, and what it spares does not depend on how long tensors are. Sizes are reached by leaving out layers.

Each load has a process of its own, as a restart has: without the cache; with an empty one, where the plan is kept;
with what that kept, where the plan is used; and by vLLM's default loader. These are the rows of a round, and ratios
are taken within one. All must end with the same bytes in every parameter and buffer.

Seconds are of CPU, since the machine may be shared, from opening the checkpoint to the report: building the model and
importing the engine are not in them. Nothing is fetched while the trace goes on, so that what reading headers and
fetching cost can be told from the rest, which is where the cache makes a difference. That rest is what the report
calls ``times.trace``, but for the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from streamer.fetch.engine import FetchEngine
from streamer.trace.storages import named_tensors
from tests.benchmarks.engine import digest
from tests.benchmarks.processes import ROOT
from tests.benchmarks.rig import RESULTS, environment, growth_exponent, medians, ratio, save
from tests.benchmarks.trace_cost import LAYERS, LAYOUT, RANK, Tensor, first_layers, version_of_vllm
from tests.sparse import DEEPSEEK_V3, write_sparse

__all__ = ["ROWS", "check_round", "growth", "small_layers", "summary"]

TRACED, KEPT, USED, DEFAULT = ROWS = ("traced", "traced and kept", "used", "default loader")
#: By row of a round: whether the cache is on, and what the report says of it then.
OUTCOMES = {TRACED: None, KEPT: "kept", USED: "used", DEFAULT: None}
FIELDS = ("cpu_seconds", "trace_cpu_seconds", "trace_seconds")

BLOCK = 16
#: Every dimension of DeepSeek-V3, and what it is here: the least that can be cut into blocks at TP=8.
SIZES = {
    7168: BLOCK,  # hidden
    18432: 8 * BLOCK,
    2048: 8 * BLOCK,
    1536: BLOCK,
    512: BLOCK,
    576: 2 * BLOCK,
    128 * 192: 8 * 2 * BLOCK,  # 8 heads instead of 128
    128 * 256: 8 * 2 * BLOCK,
    128 * 128: 8 * BLOCK,
    129280: 512,
    256: 256,  # experts
}
CONFIG: Mapping[str, Any] = {
    **DEEPSEEK_V3,
    "hidden_size": SIZES[7168],
    "intermediate_size": SIZES[18432],
    "moe_intermediate_size": SIZES[2048],
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": SIZES[1536],
    "kv_lora_rank": SIZES[512],
    "qk_nope_head_dim": BLOCK,
    "qk_rope_head_dim": BLOCK,
    "v_head_dim": BLOCK,
    "vocab_size": SIZES[129280],
    "quantization_config": {**DEEPSEEK_V3["quantization_config"], "weight_block_size": [BLOCK, BLOCK]},
}
SHARD_BYTES = 32 << 20
CHUNK_BYTES = 16 << 20


def small_layers(count: int) -> Iterator[Tensor]:
    """Yield the names of the first layers of DeepSeek-V3, with sizes as small as they can be."""
    shape: tuple[int, ...] = ()
    for name, dtype, full in first_layers(count):
        # A scale follows its weight, and has one value for each block of that.
        is_scale = name.endswith("_scale_inv")
        shape = tuple(math.ceil(size / BLOCK) for size in shape) if is_scale else tuple(SIZES[size] for size in full)
        yield name, dtype, shape


def write_checkpoint(folder: Path, layers: int) -> None:
    """Write it, every value a finite number in whatever dtype."""
    write_sparse(folder, small_layers(layers), {**CONFIG, "num_hidden_layers": layers}, shard_bytes=SHARD_BYTES)
    noise, low = random.Random(0), bytes(value & 0x3F for value in range(256))
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            begins = 8 + int.from_bytes(file.read(8), "little")
            file.seek(begins)
            left = path.stat().st_size - begins
            while left:
                left -= file.write(noise.randbytes(min(left, CHUNK_BYTES)).translate(low))


# -- one load, in a process of its own -------------------------------------------------------------------------


def load_row(row: str, folder: str, cache: str) -> dict[str, Any]:
    """Load once.

    Raises:
        RuntimeError: the plan cache did something else than this row is about.
    """
    from tests.vllm.case import Case, Checkpoint
    from tests.vllm.cpu import allow_gated_layers
    from tests.vllm.host import build, load_default
    from vllm_s3stream import register

    allow_gated_layers()
    register()
    case = Case(name="deepseek_v3", make=lambda: Checkpoint({}, {}))  # the checkpoint is there already
    with small_blocks():
        built = build(Path(folder), case, tensor=LAYOUT.tensor, rank=RANK)
    gc.collect()
    if row == DEFAULT:
        began = time.process_time()
        load_default(built)
        return {"cpu_seconds": time.process_time() - began, "digest": digest(named_tensors(built.model))}
    spent = {"open_checkpoint": 0.0, "fill": 0.0}
    with counted(spent, "open_checkpoint"), counted(spent, "fill"):
        began = time.process_time()
        report = load_ours(built, plan_cache=row != TRACED, cache_dir=cache, overlap_tensors=0)
        cpu = time.process_time() - began
    outcome = None if report.plan_cache is None else report.plan_cache.outcome
    if outcome != OUTCOMES[row]:
        raise RuntimeError(f"{row}: the report says {report.plan_cache}")
    return {
        "cpu_seconds": cpu,
        "trace_cpu_seconds": cpu - sum(spent.values()),
        "trace_seconds": report.times.trace,
        "headers_cpu_seconds": spent["open_checkpoint"],
        "fetch_cpu_seconds": spent["fill"],
        "copies": report.copies,
        "kept_bytes": sum(path.stat().st_size for path in Path(cache).rglob("*.json")),
        "digest": digest(named_tensors(built.model)),
    }


def load_ours(built: Any, **options: Any) -> Any:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    from tests.vllm.host import finalize, loading

    chosen = LoadConfig(load_format="s3stream", use_tqdm_on_load=False, model_loader_extra_config=options)
    loader: Any = get_model_loader(chosen)
    with loading(built):
        loader.load_weights(built.model, built.model_config)
    finalize(built)
    return loader.report


@contextlib.contextmanager
def counted(spent: dict[str, float], method: str) -> Iterator[None]:
    """Add up the CPU seconds that the process spends while a method of the `FetchEngine` runs."""
    original: Callable[..., Any] = getattr(FetchEngine, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            spent[method] += time.process_time() - began

    with mock.patch.object(FetchEngine, method, timed):
        yield


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Let vLLM build layers for blocks that no kernel of CPUs multiplies: nothing is multiplied here."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    with mock.patch.object(CPUFp8BlockScaledMMKernel, "can_implement", return_value=(True, None)):
        yield


# -- rounds, and what they come to -----------------------------------------------------------------------------


def measure(layers: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as name:
        folder = Path(name) / "model"
        write_checkpoint(folder, layers)
        tensors = len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
        found = []
        for number in range(rounds):
            cache = Path(name) / f"cache-{number}"
            one = {row: run_alone(row, {"folder": str(folder), "cache": str(cache)}) for row in ROWS}
            check_round(one)
            found.append(one)
            print(f"{tensors} tensors: round {number + 1} of {rounds} done", flush=True)
        files = len(list(folder.glob("*.safetensors")))
        return {"layers": layers, "tensors": tensors, "files": files, "rounds": found}


def run_alone(row: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.plan_cache", "--row", row, "--arguments", json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def check_round(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that all rows loaded the same.

    Raises:
        RuntimeError: they did not.
    """
    digests = {row: one["digest"][:8] for row, one in found.items()}
    if len(set(digests.values())) != 1:
        raise RuntimeError(f"parameters differ: {digests}")
    copies = {row: one["copies"] for row, one in found.items() if row != DEFAULT}
    if len(set(copies.values())) != 1:
        raise RuntimeError(f"copies differ: {copies}")


def summary(size: Mapping[str, Any]) -> dict[str, Any]:
    rounds = size["rounds"]
    return {
        "tensors": size["tensors"],
        "files": size["files"],
        "kept_bytes": round(statistics.median(one[KEPT]["kept_bytes"] for one in rounds)),
        **{
            f"median_{field}": {row: round(medians(rounds, row, field), 4) for row in ROWS if field in rounds[0][row]}
            for field in FIELDS
        },
        **{
            f"{field}_ratio_to_traced": {
                row: ratio(rounds, row, TRACED, field) for row in ROWS if row != TRACED and field in rounds[0][row]
            }
            for field in FIELDS
        },
    }


def growth(sizes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fit, by row, what the load takes beside headers and fetching to the number of tensors."""
    if len(sizes) < 2:
        return {}
    field = "median_trace_cpu_seconds"
    return {row: growth_exponent((size["tensors"], size[field][row]) for size in sizes) for row in (TRACED, KEPT, USED)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if options.row:
        print(json.dumps(load_row(options.row, **options.arguments)))
        return
    raw = [measure(layers, options.rounds) for layers in options.layers]
    sizes = [summary(size) for size in raw]
    document = {
        "what": "CPU seconds of loads of a small DeepSeek-V3 in vLLM at TP=8, rank 3, with and without the plan cache",
        "environment": {**environment(), "vllm": version_of_vllm()},
        "sizes": sizes,
        "growth_exponents": growth(sizes),
        "raw": raw,
    }
    path = save("plan_cache", document, options.results)
    print("| tensors | load | CPU s | to traced | beside headers and fetch, CPU s | to traced |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in sizes:
        for row, cpu in size["median_cpu_seconds"].items():
            ratios = [size[f"{field}_ratio_to_traced"].get(row, {}).get("median", "") for field in FIELDS[:2]]
            trace = size["median_trace_cpu_seconds"].get(row, "")
            print(f"| {size['tensors']} | {row} | {cpu} | {ratios[0]} | {trace} | {ratios[1]} |")
    print(f"\nbytes kept: {[size['kept_bytes'] for size in sizes]}")
    print(f"growth exponents: {document['growth_exponents']}\nraw results: {path}")


if __name__ == "__main__":
    main()
