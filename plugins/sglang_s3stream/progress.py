"""One bar in bytes, where SGLang shows one over files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from streamer.fetch.engine import Progress
from streamer.progress_bar import ByteBar

__all__ = ["byte_progress"]


@contextlib.contextmanager
def byte_progress(rank: int) -> Iterator[Progress | None]:
    """Yield what to call with bytes arrived and bytes wanted of each batch, or None but for the first rank."""
    if rank:
        yield None
        return
    bar = ByteBar()
    try:
        yield bar.update
    finally:
        bar.close()
