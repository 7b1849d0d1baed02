"""Fetching that goes on beside the code that asked for it."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable

__all__ = ["Flight"]


class Flight:
    """`work`, under way in a thread of its own.

    It must come to its end by itself when the engines that it uses are closed.

    Attributes:
        error: that it ended with.
        waited_seconds: that `land` took.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self.waited_seconds = 0.0
        self._thread = threading.Thread(
            target=self._run, args=(contextvars.copy_context(), work), name="s3stream-flight", daemon=True
        )
        self._thread.start()

    def _run(self, context: contextvars.Context, work: Callable[[], object]) -> None:
        try:
            context.run(work)  # spans belong to those of whoever asked
        except BaseException as error:  # noqa: BLE001  it is raised where the result is wanted
            self.error = error

    @property
    def is_over(self) -> bool:
        """Whether `land` would not wait."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it is over, however it ends."""
        self._thread.join()

    def land(self) -> None:
        """Wait until it is over, and raise what it raised."""
        began = time.perf_counter()
        self._thread.join()
        self.waited_seconds += time.perf_counter() - began
        if self.error is not None:
            raise self.error
