"""How large the first, speculative read of each file should be.

``python -m tests.benchmarks.header_read`` rebuilds the headers of well-known checkpoints (names, shapes
and shard sizes as published; data offsets as safetensors writes them) and computes, for each size of the
first read, how many headers it holds and how long a file's headers take on a store with 30 ms to the
first byte and 90 MB/s per connection: a second read costs another 30 ms, an unneeded byte its transfer.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.rig import RESULTS, environment, llama_config, llama_shapes, save

FIRST_BYTE_SECONDS = 0.030
BYTES_PER_SECOND = 90e6
KIB = 1024
SIZES = [4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024]

Tensors = Mapping[str, tuple[str, list[int]]]
_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4, "F16": 2}


def llama(*sizes: int) -> Tensors:
    return {name: ("BF16", shape) for name, shape in llama_shapes(llama_config(*sizes)).items()}


def experts(
    layers: int, count: int, hidden: int, wide: int, *, names: tuple[str, ...], fp8: bool, prefix: str
) -> Tensors:
    found: dict[str, tuple[str, list[int]]] = {}
    for layer in range(layers):
        for expert in range(count):
            for name in names:
                shape = [hidden, wide] if "down" in name or name == "w2" else [wide, hidden]
                key = f"model.layers.{layer}.{prefix}.experts.{expert}.{name}.weight"
                found[key] = ("F8_E4M3" if fp8 else "BF16", shape)
                if fp8:
                    found[key + "_scale_inv"] = ("F32", [-(-shape[0] // 128), -(-shape[1] // 128)])
    return found


def quantised(tensors: Tensors) -> Tensors:
    """AWQ: each linear weight becomes packed weights, zeros and scales."""
    found: dict[str, tuple[str, list[int]]] = {}
    for name, (dtype, shape) in tensors.items():
        if "proj" not in name:
            found[name] = (dtype, shape)
            continue
        stem = name.removesuffix("weight")
        found[stem + "qweight"] = ("I32", [shape[1], shape[0] // 8])
        found[stem + "qzeros"] = ("I32", [shape[1] // 128, shape[0] // 8])
        found[stem + "scales"] = ("F16", [shape[1] // 128, shape[0]])
    return found


def bert(layers: int, hidden: int) -> Tensors:
    found: dict[str, tuple[str, list[int]]] = {"embeddings.word_embeddings.weight": ("F32", [30522, hidden])}
    for layer in range(layers):
        stem = f"encoder.layer.{layer}."
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            found[f"{stem}{name}.weight"] = ("F32", [hidden, hidden])
            found[f"{stem}{name}.bias"] = ("F32", [hidden])
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            found[f"{stem}{name}.weight"] = found[f"{stem}{name}.bias"] = ("F32", [hidden])
        found[f"{stem}intermediate.dense.weight"] = found[f"{stem}output.dense.weight"] = ("F32", [4 * hidden, hidden])
        found[f"{stem}intermediate.dense.bias"] = found[f"{stem}output.dense.bias"] = ("F32", [4 * hidden])
    return found


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def corpus() -> dict[str, tuple[Tensors, float]]:
    """Checkpoints by name, with the size at which they are sharded, in bytes."""
    return {
        "Llama-3-8B": (llama(32, 4096, 14336, 32, 8, 128256), 5e9),
        "Llama-3-70B": (llama(80, 8192, 28672, 64, 8, 128256), 4.6e9),
        "Llama-3.1-405B": (llama(126, 16384, 53248, 128, 8, 128256), 4.8e9),
        "Llama-3-70B AWQ": (quantised(llama(80, 8192, 28672, 64, 8, 128256)), 5e9),
        "Llama-3.2-1B, one file": (llama(16, 2048, 8192, 32, 8, 128256), math.inf),
        "Qwen2.5-0.5B, one file": (llama(24, 896, 4864, 14, 2, 151936), math.inf),
        "Mixtral-8x7B": (
            {
                **llama(32, 4096, 14336, 32, 8, 32000),
                **experts(32, 8, 4096, 14336, names=("w1", "w2", "w3"), fp8=False, prefix="block_sparse_moe"),
            },
            4.9e9,
        ),
        "Qwen3-30B-A3B": (
            {
                **llama(48, 2048, 6144, 32, 4, 151936),
                **experts(48, 128, 2048, 768, names=GATE_UP_DOWN, fp8=False, prefix="mlp"),
            },
            4e9,
        ),
        "DeepSeek-V3": (
            {
                **llama(61, 7168, 18432, 128, 128, 129280),
                **experts(58, 256, 7168, 2048, names=GATE_UP_DOWN, fp8=True, prefix="mlp"),
            },
            4.3e9,
        ),
        "BERT-base, one file": (bert(12, 768), math.inf),
        "MiniLM-L6, one file": (bert(6, 384), math.inf),
    }


def header_bytes(tensors: Tensors, shard_bytes: float) -> Iterator[int]:
    """Yield the size of each file's header, its 8-byte length included."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = _BYTES[dtype] * math.prod(shape)
        if position and position + nbytes > shard_bytes:
            yield 8 + len(json.dumps(header, separators=(",", ":")))
            header, position = {"__metadata__": {"format": "pt"}}, 0
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    yield 8 + len(json.dumps(header, separators=(",", ":")))


def seconds(header: int, first_read: int) -> float:
    """Time until one header is known."""
    time = FIRST_BYTE_SECONDS + first_read / BYTES_PER_SECOND
    if header > first_read:
        time += FIRST_BYTE_SECONDS + (header - first_read) / BYTES_PER_SECOND
    return time


def run() -> dict[str, Any]:
    headers = {name: sorted(header_bytes(*made)) for name, made in corpus().items()}
    sizes = []
    for kib in SIZES:
        # One vote per checkpoint, by its slowest header: they are read at once, and the load waits for all.
        slowest = [seconds(found[-1], kib * KIB) for found in headers.values()]
        sizes.append(
            {
                "first_read_kib": kib,
                "checkpoints_in_one_read": sum(found[-1] <= kib * KIB for found in headers.values()),
                "mean_milliseconds": round(1000 * sum(slowest) / len(slowest), 2),
            }
        )
    return {
        "what": "time until all headers are known, by size of the first read",
        "environment": environment(),
        "first_byte_seconds": FIRST_BYTE_SECONDS,
        "bytes_per_second_per_connection": BYTES_PER_SECOND,
        "headers": {
            name: {"files": len(found), "smallest": found[0], "largest": found[-1]} for name, found in headers.items()
        },
        "sizes": sizes,
        "best_kib": min(sizes, key=lambda row: float(row["mean_milliseconds"]))["first_read_kib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    options = parser.parse_args()
    document = run()
    path = save("header_read", document, options.results)
    for name, found in document["headers"].items():
        print(f"{name}: {found['files']} files, headers {found['smallest']} to {found['largest']} bytes")
    print("\n| first read, KiB | checkpoints in one read | mean ms |\n| --- | --- | --- |")
    for row in document["sizes"]:
        print(f"| {row['first_read_kib']} | {row['checkpoints_in_one_read']} | {row['mean_milliseconds']} |")
    print(f"\nbest: {document['best_kib']} KiB; raw results: {path}")


if __name__ == "__main__":
    main()
