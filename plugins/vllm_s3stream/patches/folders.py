"""Answers vLLM's questions about files that a pulled folder lacks, or has under no name, because they are weights.

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

from streamer.artifacts.headers import headers_elsewhere
from streamer.artifacts.metadata import read_pins
from streamer.config import StreamConfig
from streamer.sources.partial import find_partial
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
        stream = options.stream if options is not None else StreamConfig.resolve()
        tensors = headers_elsewhere(Path(local_dir), stream)
        if tensors is None:
            return original(local_dir)
        return {name: {"dtype": info.dtype, "shape": list(info.shape)} for name, info in tensors.items()}

    return read


def _listing(original: Callable[..., Any]) -> Callable[..., Any]:
    def list_files(repo_id: str, *args: Any, **kwargs: Any) -> Any:
        pulled = read_pins(repo_id)
        if pulled is not None:
            return [item.key for item in pulled.items]
        partial = find_partial(Path(repo_id))
        return [*original(repo_id, *args, **kwargs), *(partial.files if partial is not None else ())]

    return list_files
