"""Builds the reference model, for planning and for running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from streamer.engines import ParallelLayout, RankModel
from streamer.errors import CheckpointError, ConfigError
from streamer.reference.config import LlamaConfig
from streamer.reference.llama import LlamaForCausalLM
from streamer.reference.parallel import Parallel

__all__ = ["ReferenceEngine", "build_llama"]


def build_llama(config: LlamaConfig, parallel: Parallel, *, load_device: str | None = None) -> LlamaForCausalLM:
    """Build one rank's model on meta; loading gives its parameters memory on `load_device`, if that is set.

    Raises:
        ConfigError: the sizes cannot be split over the ranks, or the dtype is unknown.
    """
    dtype = getattr(torch, config.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"config.json gives the dtype as {config.dtype!r}")
    with torch.device("meta"):
        model = LlamaForCausalLM(config, parallel)
    model.to(dtype)  # without memory, that is free; a default dtype would be that of all threads
    model.load_device = torch.device(load_device) if load_device else None
    return model


class ReferenceEngine:
    """The `streamer.engines.Engine` of this package."""

    def build(self, folder: Path, layout: ParallelLayout, rank: int) -> RankModel:
        if layout.pipeline != 1 or layout.experts:
            raise ConfigError("the reference engine is tensor-parallel only", hint="use --engine vllm or sglang")
        model = build_llama(LlamaConfig.from_dict(_read_config(folder)), Parallel(rank, layout.tensor))
        return RankModel(model, model.load_weights)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no config.json, which says what model this is", hint="put it beside the weights"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'} is not valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{folder / 'config.json'} is not a JSON object")
    return document
