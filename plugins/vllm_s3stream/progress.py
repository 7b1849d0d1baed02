"""``use_tqdm_on_load``: one bar in bytes, with rate and remaining time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from streamer.fetch.engine import Progress
from streamer.progress_bar import ByteBar

__all__ = ["byte_progress"]


@contextlib.contextmanager
def byte_progress(wanted: bool) -> Iterator[Progress | None]:
    """Yield what to call with bytes arrived and bytes wanted of each batch, or None where vLLM shows no bar.

    vLLM shows bars on rank 0 only, and line by line, since workers' output is prefixed.
    """
    from vllm.model_executor.model_loader import weight_utils

    enabled = getattr(weight_utils, "enable_tqdm", bool)
    if not enabled(wanted):
        yield None
        return
    bar = ByteBar(getattr(weight_utils, "_BAR_FORMAT", None))
    try:
        yield bar.update
    finally:
        bar.close()
