"""Models whose parameters have memory that was touched, and the check that a load was right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from streamer.reference.config import LlamaConfig
from streamer.reference.engine import build_llama
from streamer.reference.llama import LlamaForCausalLM
from streamer.reference.parallel import Parallel

__all__ = ["build", "check"]


def build(config: Mapping[str, Any], parallel: Parallel) -> LlamaForCausalLM:
    """Build one rank's model, all of its parameters in touched memory."""
    model = build_llama(LlamaConfig.from_dict(config), parallel, load_device="cpu")
    model.load_weights([])  # gives the parameters their memory
    for parameter in model.parameters():
        parameter.fill_(1)
    return model


def check(model: LlamaForCausalLM, file: Path, parallel: Parallel) -> None:
    """Compare every parameter with the file, read by safetensors itself."""
    expected = build_llama(model.config, parallel, load_device="cpu")
    with safe_open(file, "pt") as opened:
        expected.load_weights((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16)), f"{name} is wrong"
