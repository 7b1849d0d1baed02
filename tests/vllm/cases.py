"""The census: one tiny checkpoint for each way in which vLLM's models load weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.vllm.case import Case, Tensors
from tests.vllm.decoders import DECODERS
from tests.vllm.encoders import ENCODERS
from tests.vllm.multimodal import MULTIMODAL
from tests.vllm.quantised import QUANTISED
from tests.vllm.recurrent import RECURRENT

__all__ = ["CASES", "Case", "write_checkpoint"]

CASES: tuple[Case, ...] = (*DECODERS, *RECURRENT, *ENCODERS, *MULTIMODAL, *QUANTISED)


def write_checkpoint(case: Case, folder: Path) -> None:
    """Write `case` into `folder`, which is made; the same bytes each time."""
    from safetensors.torch import save_file

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        checkpoint = case.make()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": checkpoint.config, **case.files}.items():
        (folder / name).write_text(json.dumps(content))
    shards = _shards(case, checkpoint.tensors)
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, shard in zip(files, shards, strict=True):
        # Copied, because safetensors refuses tensors that share memory, as the halves of a fused one do.
        copies = {name: tensor.contiguous().clone() for name, tensor in shard.items()}
        save_file(copies, folder / file, metadata={"format": "pt"})


def _shards(case: Case, tensors: Tensors) -> list[Tensors]:
    if case.order is not None:
        return [{name: tensors[name]} for name in sorted(tensors, key=case.order)]
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[start :: case.shards]} for start in range(case.shards)]
