"""Builds SGLang's models at any rank in this process, loads them, and compares what was loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sglang_s3stream.parallel import pretend

__all__ = ["Loaded", "load", "served", "server_arguments"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """One rank's model with its weights, and the loader that read them.

    Attributes:
        config: SGLang's ``ModelConfig``.
    """

    model: nn.Module
    loader: Any
    config: Any

    def update(self, path: str, load_format: str = "s3stream", **more: Any) -> tuple[bool, str]:
        """Update the weights as a scheduler process does; only within `served`."""
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.runtime_context import get_context

        def note(model: nn.Module, *, model_path: str, load_format: str, load_config: Any) -> None:
            if not self.config.is_draft_model:
                get_context().override("test", model_path=model_path, load_format=load_format)

        updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=self.config,
            custom_weight_loaders={},
            get_model=lambda: self.model,
            update_model_fields=note,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )
        done: tuple[bool, str] = updater.update_weights_from_disk(path, load_format, **more)
        return done


def server_arguments(model: str | Path, **arguments: Any) -> Any:
    """Return a ``ServerArgs``, not yet resolved."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(model), device="cpu", skip_tokenizer_init=True, disable_cuda_graph=True, **arguments
    )


def load(model: str | Path, **more: Any) -> Loaded:
    """Build and load one rank's model; see `served`."""
    with served(model, **more) as loaded:
        return loaded


@contextmanager
def served(
    model: str | Path,
    *,
    rank: int = 1,
    load_format: str = "s3stream",
    extra: Mapping[str, Any] | None = None,
    draft: str | Path | None = None,
    **more: Any,
) -> Iterator[Loaded]:
    """Build and load one rank's model, of two unless `more` says otherwise, and be that scheduler process meanwhile.

    Args:
        draft: load this instead, as the draft model of `model`.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components.load_model_utils import build_load_config
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import get_model

    arguments = server_arguments(
        model, **{"tp_size": 2, "load_format": load_format, "model_loader_extra_config": dict(extra or {}), **more}
    )
    with pretend(arguments, rank=rank):
        folder = get_model().model_path if draft == model else str(draft)  # of a URL, where it was pulled to
        as_draft = {} if draft is None else {"model_path": folder, "is_draft_model": True}
        model_config = ModelConfig.from_server_args(arguments, **as_draft)
        if arguments.ep_num_redundant_experts:
            _place_experts(model_config)
        load_config = build_load_config(
            server_args=arguments,
            tp_rank=rank,
            remote_instance_weight_transporter_engine=None,
            remote_instance_weight_transporter_session_id="",
            draft_model_idx=None,
            weight_cache_mode="off",
            weight_cache_socket=None,
        )
        loader = get_model_loader(load_config, model_config)
        torch.manual_seed(0)  # a few layers draw their initial values
        with _memory_filled():
            built = loader.load_model(model_config=model_config, device_config=DeviceConfig("cpu", 0))
        yield Loaded(built, loader, model_config)


def _place_experts(model_config: Any) -> None:
    """Say which experts lie where, as a model runner does before it builds its model."""
    from sglang.srt.eplb.expert_location import (
        compute_initial_expert_location_metadata,
        set_global_expert_location_metadata,
    )
    from sglang.srt.runtime_context import get_parallel

    places = compute_initial_expert_location_metadata(model_config, get_parallel().moe_ep_rank)
    set_global_expert_location_metadata(places)


@contextmanager
def _memory_filled() -> Iterator[None]:
    """Let ``torch.empty`` fill memory (NaN, or the largest integer), which it does in deterministic mode only."""
    deterministic: Any = torch.utils.deterministic
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        deterministic.fill_uninitialized_memory = fill
