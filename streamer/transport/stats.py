"""What a source did, counted."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["TransferStats"]


@dataclass(slots=True)
class TransferStats:
    """Counters of one source; only ever written from its event loop.

    Attributes:
        requests: ranged reads sent, retries included.
        bytes_received: body bytes that arrived, good or not needed any more.
        retries: tries after a failure.
        resumed_bytes: bytes that a failed try had delivered and that were not asked for again.
        throttled: answers that asked for fewer requests.
        hedges: reads that were asked for a second time because they took long.
        concurrency: requests in flight that serve best, as far as is known by now; 0 where nobody finds out.
        first_byte_at: ``time.monotonic`` when the first body was complete or under way; None before.
    """

    requests: int = 0
    bytes_received: int = 0
    retries: int = 0
    resumed_bytes: int = 0
    throttled: int = 0
    hedges: int = 0
    concurrency: int = 0
    first_byte_at: float | None = None

    def note_bytes(self, count: int) -> None:
        self.bytes_received += count
        if self.first_byte_at is None and count:
            self.first_byte_at = time.monotonic()
