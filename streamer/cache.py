"""The folder in which what may be needed again is kept."""

from __future__ import annotations

import os
from pathlib import Path

from streamer.config import StreamConfig

__all__ = ["cache_folder"]


def cache_folder(config: StreamConfig, purpose: str) -> Path:
    """Return the folder for `purpose`, which may not exist yet: below ``cache_dir``, or where the user's caches are."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute() / purpose
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "s3stream" / purpose
