"""Reads the headers of weights that a folder has not, or not under their names, for engines that look at them first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from streamer.artifacts.metadata import read_pins
from streamer.checkpoint.checkpoint import TensorInfo
from streamer.config import StreamConfig
from streamer.fetch.engine import FetchEngine
from streamer.sources.base import Source
from streamer.sources.open import open_source
from streamer.sources.partial import find_partial
from streamer.sources.pinned import PinnedSource

__all__ = ["headers_elsewhere"]


def headers_elsewhere(folder: Path, config: StreamConfig) -> Mapping[str, TensorInfo] | None:
    """Return the tensors of the weights that belong to `folder`, by name, in file and data order.

    They are in a store, if the folder was pulled from there, or in files for some ranks only.

    Returns:
        None if it is a folder like others, whose weights lie in it.

    Raises:
        CheckpointError, SourceError: see `streamer.errors`.
    """
    pulled = read_pins(folder)
    source: Source
    if pulled is not None:
        if not any(item.key.endswith(".safetensors") for item in pulled.items):
            return {}
        source = PinnedSource(open_source(pulled.url, config), pulled.items)
    elif find_partial(folder) is not None:
        source = open_source(str(folder), config)
    else:
        return None
    with FetchEngine(source, config) as engine:
        return engine.open_checkpoint().checkpoint.tensors
