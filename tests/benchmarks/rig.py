"""What benchmarks share: a checkpoint, a server in another process, one measured process per row."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results"
GIB = 1 << 30


def llama_config(layers: int, hidden: int, wide: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
    }


def llama_shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    hidden, wide, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden]}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        shapes |= {
            layer + "input_layernorm.weight": [hidden],
            layer + "mlp.down_proj.weight": [hidden, wide],
            layer + "mlp.gate_proj.weight": [wide, hidden],
            layer + "mlp.up_proj.weight": [wide, hidden],
            layer + "post_attention_layernorm.weight": [hidden],
            layer + "self_attn.k_proj.weight": [kv, hidden],
            layer + "self_attn.o_proj.weight": [hidden, hidden],
            layer + "self_attn.q_proj.weight": [hidden, hidden],
            layer + "self_attn.v_proj.weight": [kv, hidden],
        }
    return shapes | {"model.norm.weight": [hidden], "lm_head.weight": [vocabulary, hidden]}


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> int:
    """Write one file of bf16 noise and its config; return the payload's bytes."""
    header, position = {}, 0
    for name, shape in llama_shapes(config).items():
        nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    noise = os.urandom(64 << 20)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = 0
        while written < position:
            written += file.write(noise[: position - written])
    (folder / "config.json").write_text(json.dumps(config))
    return position


@contextlib.contextmanager
def object_server(root: Path, *options: str, module: str = "tests.servers.object_server") -> Iterator[str]:
    """Our object server in a process of its own, on processor 0 where there are two."""
    command = [sys.executable, "-m", module, str(root), *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=_pin(0)
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def _pin(processor: int) -> Callable[[], None]:
    available = sorted(os.sched_getaffinity(0))

    def pin() -> None:
        if len(available) > 1:
            os.sched_setaffinity(0, {available[processor]})

    return pin


@dataclass
class Sample:
    """One measured run."""

    cpu_seconds: float
    wall_seconds: float
    nbytes: int
    peak_extra_bytes: int

    @property
    def cpu_per_gib(self) -> float:
        return self.cpu_seconds / (self.nbytes / GIB)


def reset_peak_memory() -> None:
    """Make VmHWM start anew at the present size (man 5 proc_pid_clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> int:
    """Bytes of ``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure(work: Callable[[], int]) -> Sample:
    """Run `work`, which returns the bytes it moved, in this process; destinations are touched beforehand.

    The warm-up's garbage is collected first: otherwise a full collection of torch's heap, 0.2 s, falls
    into every second measurement by chance.
    """
    gc.collect()
    before = memory("VmRSS")
    reset_peak_memory()
    usage, clock = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    nbytes = work()
    wall, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return Sample(cpu, wall, nbytes, memory("VmHWM") - before)


def run_row(module: str, row: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run one row of a benchmark in a process of its own, on processor 1; return its JSON."""
    environ = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-m", module, "--row", row, "--arguments", json.dumps(dict(arguments))],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        preexec_fn=_pin(-1),
    )
    if done.returncode:
        raise RuntimeError(f"row {row} failed:\n{done.stderr[-3000:]}")
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def emit(sample: Sample, **more: Any) -> None:
    print(json.dumps({**asdict(sample), "cpu_per_gib": sample.cpu_per_gib, **more}))


def medians(rounds: Sequence[Mapping[str, Mapping[str, Any]]], row: str, field: str) -> float:
    return float(statistics.median(one[row][field] for one in rounds))


def ratio(rounds: Sequence[Mapping[str, Mapping[str, Any]]], row: str, other: str, field: str) -> dict[str, float]:
    """Ratios of two rows, taken within each round: minimum, median, maximum."""
    ratios = [one[row][field] / one[other][field] for one in rounds]
    return {
        "min": round(min(ratios), 3),
        "median": round(statistics.median(ratios), 3),
        "max": round(max(ratios), 3),
    }


def environment() -> dict[str, Any]:
    import torch

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    from importlib.metadata import version

    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model,
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "aiobotocore": version("aiobotocore"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def save(name: str, document: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path
