"""Builds the reference model, for planning and for running."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from streamer.engines import ParallelLayout
from streamer.errors import ConfigError
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
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(config, parallel)
    finally:
        torch.set_default_dtype(before)
    model.load_device = torch.device(load_device) if load_device else None
    return model


class ReferenceEngine:
    """The `streamer.engines.Engine` of this package."""

    def build(self, config: Mapping[str, Any], layout: ParallelLayout, rank: int) -> LlamaForCausalLM:
        if layout.pipeline != 1 or layout.experts:
            raise ConfigError("the reference engine is tensor-parallel only", hint="use --engine vllm or sglang")
        return build_llama(LlamaConfig.from_dict(config), Parallel(rank, layout.tensor))
