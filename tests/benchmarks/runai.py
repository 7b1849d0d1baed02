"""Run:ai Model Streamer, called as vLLM calls it."""

from __future__ import annotations

from typing import Any

__all__ = ["PACKAGES", "load"]

PACKAGES = ("runai-model-streamer", "runai-model-streamer-s3")


def load(model: Any, url: str, *, is_distributed: bool = False) -> int:
    """Load the checkpoint in the folder `url` into a model with ``load_weights``; return the bytes of its tensors.

    vLLM's ``runai_safetensors_weights_iterator`` also clones every tensor. Since 0.17 they belong to whoever
    gets them, so that is left out, to Run:ai's advantage. Settings are variables, which are read on import.

    Raises:
        RuntimeError: `is_distributed` was asked for and the library decided to do without, which it only logs.
    """
    from runai_model_streamer import SafetensorsStreamer, list_safetensors

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list_safetensors(url), device="cpu", is_distributed=is_distributed)
        if is_distributed and not streamer.file_streamer.is_distributed:
            raise RuntimeError("Run:ai Model Streamer fell back to reading everything on every rank")
        model.load_weights(streamer.get_tensors())
        return int(streamer.total_size)
