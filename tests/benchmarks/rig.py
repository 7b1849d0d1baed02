"""What benchmarks share: a checkpoint to load, and what becomes of the measurements."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def spread(found: Mapping[str, float]) -> str:
    """Write a `ratio` for a table."""
    return f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})"


def growth_exponent(points: Iterable[tuple[float, float]]) -> float:
    """Fit ``y = c * x ** exponent`` to `points`, all positive, by least squares of the logarithms."""
    logarithms = [(math.log(x), math.log(y)) for x, y in points]
    x, y = (statistics.fmean(column) for column in zip(*logarithms, strict=True))
    return round(sum((a - x) * (b - y) for a, b in logarithms) / sum((a - x) ** 2 for a, _ in logarithms), 3)


def environment(*packages: str) -> dict[str, Any]:
    """Return what the figures depend on, with the versions of `packages`."""
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
        "torch": version("torch"),
        **{package: version(package) for package in ("aiobotocore", *packages)},
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def save(name: str, document: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path
