"""s3stream: load LLM weights straight from object storage, each rank only the bytes it needs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamer.config import StreamConfig
    from streamer.loader import iterate, load
    from streamer.report import LoadReport

__all__ = ["LoadReport", "StreamConfig", "__version__", "iterate", "load"]

__version__ = "0.1.0"

_HOMES = {
    "LoadReport": "streamer.report",
    "StreamConfig": "streamer.config",
    "iterate": "streamer.loader",
    "load": "streamer.loader",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that the parts without torch can be used where torch is not installed.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
