"""Answers vLLM's questions about files that a pulled folder lacks, because they are weights.

vLLM looks into a model's folder for more than it loads: the headers of its safetensors files give a missing
dtype and say whether a checkpoint with tied embeddings has an ``lm_head`` nevertheless
(``vllm/transformers_utils/config.py``, ``vllm/config/model.py``), and the names of its files say whether it
is in Mistral's own format (``vllm/transformers_utils/repo_utils.py``). We know the names, and read headers
from where they are.

Remove when vLLM asks the load format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamer.artifacts.headers import remote_headers
from streamer.artifacts.metadata import PulledFolder, read_pins
from streamer.config import StreamConfig
from vllm_s3stream.urls import configuring

__all__ = ["install"]


def install() -> None:
    """Wrap the functions that read headers and list files in a folder."""
    from vllm.transformers_utils import config, repo_utils

    for module, name, wrap in (
        (config, "_read_safetensors_metadata_in_dir", _reading_headers),
        (repo_utils, "list_repo_files", _listing),
    ):
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, "__s3stream__"):
            wrapped = functools.wraps(original)(wrap(original))
            wrapped.__s3stream__ = True  # type: ignore[attr-defined]
            setattr(module, name, wrapped)


def _reading_headers(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(local_dir: Path) -> Any:
        options = configuring.get()
        if options is not None and options.sharded:
            return {}  # a state dict holds tied weights under one name; vLLM asks none of its own either
        pulled = read_pins(local_dir)
        if pulled is None:
            return original(local_dir)
        return _headers(pulled, options.stream if options is not None else StreamConfig.resolve())

    return read


def _listing(original: Callable[..., Any]) -> Callable[..., Any]:
    def list_files(repo_id: str, *args: Any, **kwargs: Any) -> Any:
        pulled = read_pins(repo_id)
        return original(repo_id, *args, **kwargs) if pulled is None else [item.key for item in pulled.items]

    return list_files


def _headers(pulled: PulledFolder, config: StreamConfig) -> dict[str, Any]:
    tensors = remote_headers(pulled, config)
    return {name: {"dtype": info.dtype, "shape": list(info.shape)} for name, info in tensors.items()}
