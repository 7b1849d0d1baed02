"""What a case of the census is, and checkpoints made with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

__all__ = ["SMALL", "WIDE", "Case", "Change", "Checkpoint", "Tensors", "hub"]

Tensors = dict[str, torch.Tensor]

SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
# Quantisation groups and blocks of 128 must fit into half of each dimension.
WIDE: Mapping[str, Any] = {**SMALL, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint and its ``config.json``."""

    tensors: Tensors
    config: dict[str, Any]


Change = Callable[[Checkpoint], Checkpoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tiny checkpoint, and how vLLM is to be asked for it.

    Attributes:
        make: draws the checkpoint from torch's default generator.
        engine: keywords of ``EngineArgs``.
        order: sort key of tensor names; each then gets a shard of its own, because within a file vLLM reads by name.
        shards: files to spread the tensors over.
        experts: whether tensor-parallel ranks split experts whole.
        files: further JSON files by name.
        unsupported: why vLLM itself cannot load this here.
    """

    name: str
    make: Callable[[], Checkpoint]
    engine: Mapping[str, Any] = field(default_factory=dict)
    order: Callable[[str], Any] | None = None
    shards: int = 1
    experts: bool = False
    files: Mapping[str, Any] = field(default_factory=dict)
    unsupported: str | None = None


def hub(
    model_type: str,
    /,
    *changes: Change,
    model: str = "AutoModelForCausalLM",
    patch: Mapping[str, Any] | None = None,
    **config: Any,
) -> Callable[[], Checkpoint]:
    """Return a function that makes a checkpoint with the names and layouts that ``save_pretrained`` writes.

    Args:
        changes: made to it in this order, to get forms that transformers does not write.
        model: a class of transformers.
        patch: fields of ``config.json`` that only the hub's remote code or vLLM know.
        config: fields of the model's configuration.
    """

    def make() -> Checkpoint:
        checkpoint = _save(model_type, model, config)
        checkpoint.config.update(patch or {})
        for change in changes:
            checkpoint = change(checkpoint)
        return checkpoint

    return make


def _save(model_type: str, model: str, fields: Mapping[str, Any]) -> Checkpoint:
    import transformers
    from safetensors.torch import load_file

    cls: Any = getattr(transformers, model)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    module = cls.from_config(config) if model.startswith("Auto") else cls(config)
    with TemporaryDirectory() as folder:
        module.to(torch.bfloat16).save_pretrained(folder)
        saved = {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}
        written = json.loads((Path(folder) / "config.json").read_text())
    return Checkpoint(_random(saved.items()), written)


def _random(tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    """Replace initial values, many of which are zeros and ones: tensors that are mixed up must show."""
    return {
        name: (torch.randn(t.shape) * 0.05).to(t.dtype) if t.is_floating_point() else t for name, t in sorted(tensors)
    }
