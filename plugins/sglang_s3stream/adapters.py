"""LoRA adapters behind URLs: SGLang gets a folder with all of one, weights included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamer.artifacts.locate import is_url
from streamer.artifacts.metadata import pull
from streamer.config import StreamConfig

__all__ = ["read_adapter"]


def read_adapter(original: Callable[..., None], config: Any, path: str | None = None, *rest: Any, **more: Any) -> None:
    """Surround ``lora.lora_config.LoRAConfig.__init__``, from whose ``path`` SGLang then reads the weights too.

    Options come from ``S3STREAM_*`` variables: a request to load an adapter carries none.

    Raises:
        CheckpointError, ConfigError, SourceError: see `streamer.errors`.
    """
    if path is not None and is_url(path):
        path = str(pull(path, StreamConfig.resolve(), everything=True).folder)
    original(config, path, *rest, **more)
