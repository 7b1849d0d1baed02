"""Lets ``EngineArgs`` take a URL as model.

vLLM knows object stores only through one package: for ``s3://`` its configuration calls that package and
refuses other load formats (``vllm/config/vllm.py``, "To load a model from object storage"), and it takes
other schemes for names on the hub. So URLs must have become folders before ``ModelConfig`` is made.

Remove when vLLM lets a load format resolve model paths itself.
"""

from __future__ import annotations

import functools
from typing import Any

from streamer.artifacts.locate import is_url
from vllm_s3stream.urls import resolve_all

__all__ = ["install"]


def install() -> None:
    """Wrap the methods of ``EngineArgs`` that make configurations out of it."""
    from vllm.engine import arg_utils

    for name in ("create_engine_config", "create_model_config"):
        original = getattr(arg_utils.EngineArgs, name, None)
        if original is not None and not hasattr(original, "__s3stream__"):
            setattr(arg_utils.EngineArgs, name, _resolving(original))
    # With HF_HUB_OFFLINE, names that are no object storage are looked up in the hub's cache before we are asked.
    known = getattr(arg_utils, "is_cloud_storage", None)
    if known is not None and not hasattr(known, "__s3stream__"):

        @functools.wraps(known)
        def is_cloud_storage(name: str) -> bool:
            return bool(known(name)) or is_url(name)

        is_cloud_storage.__s3stream__ = True  # type: ignore[attr-defined]
        arg_utils.is_cloud_storage = is_cloud_storage


def _resolving(original: Any) -> Any:
    @functools.wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        with resolve_all(self):
            return original(self, *args, **kwargs)

    create.__s3stream__ = True  # type: ignore[attr-defined]
    return create
