"""Answers vLLM's questions about the tensors of a checkpoint whose weights are not on this machine.

vLLM reads the headers of the safetensors files in a model's folder to find a missing dtype and to see
whether a checkpoint with tied embeddings has an ``lm_head`` nevertheless
(``vllm/transformers_utils/config.py``, ``vllm/config/model.py``). Our folder has no such files; their
headers are read from where they are.

Remove when vLLM asks the load format.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from streamer.artifacts.metadata import PulledFolder, read_pins
from streamer.config import StreamConfig
from streamer.fetch.engine import FetchEngine
from streamer.sources.open import open_source
from streamer.sources.pinned import PinnedSource
from vllm_s3stream.urls import configuring

__all__ = ["install"]


def install() -> None:
    """Wrap the function that reads headers in a folder."""
    from vllm.transformers_utils import config

    original = getattr(config, "_read_safetensors_metadata_in_dir", None)
    if original is None or hasattr(original, "__s3stream__"):
        return

    @functools.wraps(original)
    def read(local_dir: Path) -> dict[str, Any]:
        options = configuring.get()
        if options is not None and options.sharded:
            return {}  # a state dict holds tied weights under one name; vLLM asks none of its own either
        pulled = read_pins(local_dir)
        if pulled is None:
            return dict(original(local_dir))
        return _headers(pulled, options.stream if options is not None else StreamConfig.resolve())

    read.__s3stream__ = True  # type: ignore[attr-defined]
    config._read_safetensors_metadata_in_dir = read


def _headers(pulled: PulledFolder, config: StreamConfig) -> dict[str, Any]:
    if not any(item.key.endswith(".safetensors") for item in pulled.items):
        return {}
    with FetchEngine(PinnedSource(open_source(pulled.url, config), pulled.items), config) as engine:
        tensors = engine.open_checkpoint().checkpoint.tensors
    return {name: {"dtype": info.dtype, "shape": list(info.shape)} for name, info in tensors.items()}
