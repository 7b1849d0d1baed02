"""Lets LoRA adapters be URLs.

Workers turn an adapter's path into a local one with ``get_adapter_absolute_path``
(``vllm/lora/utils.py``), which knows paths and the hub, and then read files from there. A URL becomes a
folder with all of the adapter, weights included, kept like a model's other files: once per node, and a
folder of its own for each version of it. Options come from ``S3STREAM_*`` variables: a request carries none.

Remove when ``vllm.lora.resolver`` is asked for adapters that a request or the command line gives a path.
"""

from __future__ import annotations

import functools

from streamer.artifacts.locate import is_url
from streamer.artifacts.metadata import pull
from streamer.config import StreamConfig

__all__ = ["install"]


def install() -> None:
    """Wrap the function where it is defined and where the worker has it by name."""
    from vllm.lora import utils, worker_manager

    original = getattr(utils, "get_adapter_absolute_path", None)
    if original is None or hasattr(original, "__s3stream__"):
        return

    @functools.wraps(original)
    def absolute_path(lora_path: str) -> str:
        if is_url(lora_path):
            return str(pull(lora_path, StreamConfig.resolve(), everything=True).folder)
        return str(original(lora_path))

    absolute_path.__s3stream__ = True  # type: ignore[attr-defined]
    utils.get_adapter_absolute_path = absolute_path
    if getattr(worker_manager, "get_adapter_absolute_path", None) is original:
        worker_manager.get_adapter_absolute_path = absolute_path
