"""Answers SGLang's questions about files that a pulled folder lacks, because they are weights.

SGLang looks into checkpoints for dtypes that their configuration does not tell, to choose how experts and one of
DeepSeek's projections are quantised, and takes a missing file for another answer. We know where to read headers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from streamer.artifacts.headers import headers_elsewhere
from streamer.config import StreamConfig

__all__ = ["configuring", "dtype_of_projection", "has_float8_experts"]

#: The options of the server that is being configured, for what SGLang asks meanwhile.
configuring: ContextVar[StreamConfig | None] = ContextVar("configuring", default=None)


def has_float8_experts(original: Callable[[str], bool], model_path: str) -> bool:
    """Surround ``utils.common.has_fp8_weights_in_checkpoint``, which asks the first tensor of experts that it finds."""
    dtypes = _dtypes(model_path)
    if dtypes is None:
        return original(model_path)
    experts = (dtype for name, dtype in dtypes.items() if "experts" in name and "weight" in name)
    return next(experts, None) == "F8_E4M3"


def dtype_of_projection(original: Callable[..., str | None], model_config: Any, download_dir: str | None) -> str | None:
    """Surround ``arg_groups.model_hook._probe_wo_a_weight_dtype``."""
    dtypes = _dtypes(model_config.model_path)
    if dtypes is None:
        return original(model_config, download_dir)
    return next((dtype for name, dtype in dtypes.items() if name.endswith(".wo_a.weight")), None)


def _dtypes(folder: str) -> dict[str, str] | None:
    """Return the dtypes of a checkpoint's tensors, by name; None for a folder that holds its weights itself."""
    config = configuring.get()
    headers = headers_elsewhere(Path(folder), StreamConfig.resolve() if config is None else config)
    return None if headers is None else {name: info.dtype for name, info in headers.items()}
