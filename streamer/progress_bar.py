"""One bar in bytes, with rate and remaining time, by tqdm, which engines bring."""

from __future__ import annotations

from typing import Any

__all__ = ["ByteBar"]


class ByteBar:
    """Takes what a load reports of its progress, batch by batch, and draws it as one bar.

    Args:
        bar_format: tqdm's.
    """

    def __init__(self, bar_format: str | None = None) -> None:
        self._format = bar_format
        self._bar: Any = None
        self._before = 0  # bytes of batches that are complete
        self._batch = (0, 0)

    def update(self, arrived: int, total: int) -> None:
        """See `streamer.fetch.engine.Progress`."""
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
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
