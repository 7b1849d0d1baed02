"""A network link of limited rate, which all connections of a server share."""

from __future__ import annotations

import threading
import time

__all__ = ["Link"]


class Link:
    """Gives out turns to send, one after the other.

    Args:
        bytes_per_second: of all senders together.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until `nbytes` have had the link to themselves, after all that was asked for before."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + nbytes / self.bytes_per_second
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))
