"""The vLLM plugin: ``vllm serve s3://bucket/model --load-format s3stream``.

vLLM calls `register` in every process, through the entry point group ``vllm.general_plugins``. Nothing of
vLLM is imported before that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_s3stream.update.driver import Updated, update_weights, update_weights_async

__all__ = ["Updated", "register", "update_weights", "update_weights_async"]

LOAD_FORMAT = "s3stream"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("vllm_s3stream.update.driver"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Add the load format, and let vLLM accept URLs with it. May be called any number of times."""
    from vllm.model_executor import model_loader

    from vllm_s3stream.patches import adapters, engine_args, folders
    from vllm_s3stream.versions import warn_if_untested

    registered = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if LOAD_FORMAT not in registered:
        from vllm_s3stream.loader import S3StreamLoader

        warn_if_untested()
        model_loader.register_model_loader(LOAD_FORMAT)(S3StreamLoader)
    for patch in (engine_args, folders, adapters):
        patch.install()
