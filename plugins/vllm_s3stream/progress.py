"""``use_tqdm_on_load``: one bar in bytes, with rate and remaining time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from streamer.fetch.engine import Progress

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
    bar = _Bar(getattr(weight_utils, "_BAR_FORMAT", None))
    try:
        yield bar.update
    finally:
        bar.close()


class _Bar:
    def __init__(self, bar_format: str | None) -> None:
        self._format = bar_format
        self._bar: Any = None
        self._before = 0  # bytes of batches that are complete
        self._batch = (0, 0)

    def update(self, arrived: int, total: int) -> None:
        if arrived < self._batch[0] or total != self._batch[1]:
            self._before += self._batch[1]
        self._batch = arrived, total
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(
                desc="Loading weights", unit="B", unit_scale=True, total=total, mininterval=2, bar_format=self._format
            )
        self._bar.total = self._before + total
        self._bar.update(self._before + arrived - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
