"""Reads the headers of weights that a pulled folder lacks, for engines that look into them before they load."""

from __future__ import annotations

from collections.abc import Mapping

from streamer.artifacts.metadata import PulledFolder
from streamer.checkpoint.checkpoint import TensorInfo
from streamer.config import StreamConfig
from streamer.fetch.engine import FetchEngine
from streamer.sources.open import open_source
from streamer.sources.pinned import PinnedSource

__all__ = ["remote_headers"]


def remote_headers(pulled: PulledFolder, config: StreamConfig) -> Mapping[str, TensorInfo]:
    """Return the tensors of the checkpoint that `pulled` belongs to, by name, in file and data order.

    Raises:
        CheckpointError, SourceError: see `streamer.errors`.
    """
    if not any(item.key.endswith(".safetensors") for item in pulled.items):
        return {}
    with FetchEngine(PinnedSource(open_source(pulled.url, config), pulled.items), config) as engine:
        return engine.open_checkpoint().checkpoint.tensors
