"""Models for tests of updates: two checkpoints of a case, and engines' models that were loaded from one of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.share.group import Group
from tests.tensors import tensors_of
from tests.vllm.case import Case
from tests.vllm.host import Built, build, finalize, loading

__all__ = ["EXTENSION", "another_version", "load", "memory_of", "update", "values_of"]

EXTENSION = "vllm_s3stream.update.Updates"


def another_version(folder: Path, target: Path) -> Path:
    """Write a checkpoint with the tensors of `folder` and other values."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    for file in target.glob("*.safetensors"):
        tensors = {name: _other(tensor) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def _other(tensor: torch.Tensor) -> torch.Tensor:
    # Eight-bit floats are moved as bytes. What is packed stays valid when it is moved.
    plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    moved = plain.flatten().roll(1).view(tensor.dtype).reshape(tensor.shape)
    return (moved * 1.5).contiguous() if tensor.is_floating_point() and tensor.element_size() > 1 else moved.clone()


def load(folder: Path, case: Case, *, tensor: int = 1, rank: int = 0, **options: Any) -> Built:
    """Build and load one rank's model as an engine does whose workers have the extension."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from vllm_s3stream.loader import S3StreamLoader

    built = build(folder, case, tensor=tensor, rank=rank)
    built.vllm_config.parallel_config.worker_extension_cls = EXTENSION
    built.vllm_config.load_config = LoadConfig(
        load_format="s3stream", use_tqdm_on_load=False, model_loader_extra_config=options
    )
    with loading(built):
        S3StreamLoader(built.vllm_config.load_config).load_weights(built.model, built.model_config)
    finalize(built)
    with loading(built):
        process_weights_after_loading(built.model, built.model_config, torch.device("cpu"))
    return built


def update(built: Built, url: str | Path, version: str | None = None, *, group: Group | None = None) -> None:
    """Update a model as a worker does.

    Raises:
        StreamError: see `Transaction`.
    """
    from vllm_s3stream.options import PluginOptions
    from vllm_s3stream.update.transaction import Transaction

    options = PluginOptions.parse(built.vllm_config.load_config.model_loader_extra_config)
    with loading(built):
        Transaction(built.model, built.vllm_config, options, group).run(str(url), version)


def memory_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return, by name, which object each tensor is and where its memory is."""
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors_of(model).items()}


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all tensors, of the same classes."""
    copies = {}
    for name, tensor in tensors_of(model).items():
        copies[name] = tensor.data.clone()
        copies[name].__class__ = type(tensor)
    return copies
