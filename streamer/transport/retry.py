"""When to try again: one policy for bodies, listings and signing.

A range gives up after `attempts` failures in a row or `deadline_seconds` without progress, whichever
comes first. A failed try that had delivered enough bytes is progress: a store that drops every
connection after 100 MB still finishes, one that drops each after a byte does not. The shape is
tenacity's (stop, wait, before-sleep hook); the loop is ours because a successful first try, which is
nearly every one, must cost no more than the call itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from streamer.config import StreamConfig
from streamer.errors import SourceError

__all__ = ["Attempts", "RetryPolicy", "TransientFailure", "call_with_retries"]

T = TypeVar("T")


class TransientFailure(Exception):
    """One failed try that may be repeated. Internal: callers see `final`.

    Args:
        final: the error to raise when it is not repeated any more.
        retry_after: seconds the server asked for.
        most_attempts: fewer tries than the policy's, for answers that seldom change.
        free: costs no attempt and no wait: a keep-alive connection that the server had already closed.
        asked_too_much: the store said so by other means than the status.
    """

    def __init__(
        self,
        final: SourceError,
        *,
        retry_after: float | None = None,
        most_attempts: int | None = None,
        free: bool = False,
        asked_too_much: bool = False,
    ) -> None:
        super().__init__(final.message)
        self.final = final
        self.retry_after = retry_after
        self.most_attempts = most_attempts
        self.free = free
        self.asked_too_much = asked_too_much


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits and waits, in seconds. `clock`, `sleep` and `rng` are replaced in tests."""

    attempts: int
    deadline_seconds: float
    first_wait_seconds: float
    longest_wait_seconds: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    rng: Callable[[float, float], float] = random.uniform

    @classmethod
    def from_config(cls, config: StreamConfig) -> RetryPolicy:
        return cls(
            attempts=config.retry_attempts,
            deadline_seconds=config.retry_deadline_seconds,
            first_wait_seconds=config.retry_first_wait_seconds,
            longest_wait_seconds=config.retry_longest_wait_seconds,
        )

    def wait_seconds(self, failures: int, retry_after: float | None) -> float:
        """Wait after `failures` in a row: full jitter, on top of what the server asked for.

        See https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/. Jitter is added to
        ``Retry-After`` because otherwise every rank of a node would come back in the same instant.
        """
        bound = min(self.longest_wait_seconds, self.first_wait_seconds * 2 ** min(failures - 1, 40))
        return self.rng(0, bound) + (retry_after or 0.0)


class Attempts:
    """The history of one operation, seen by whoever decides whether it goes on."""

    __slots__ = ("_policy", "_progressed_at", "_started_at", "failures", "free", "limited", "progressed", "total")

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._started_at = self._progressed_at = policy.clock()
        self.total = 0
        self.failures = 0
        self.limited = 0
        """Those of the failures that allow fewer tries; a busy store must not use these up."""
        self.free = 0
        self.progressed = False
        """Set by the operation when the current try delivered enough to count as progress."""

    def pause_after(self, failure: TransientFailure) -> float | None:
        """Count `failure`; return how long to wait, or None to give up."""
        policy, now = self._policy, self._policy.clock()
        if self.progressed:
            self.failures, self.limited, self._progressed_at, self.progressed = 0, 0, now, False
        if failure.free and self.free < policy.attempts:
            self.free += 1
            return 0.0
        self.failures += 1
        if failure.most_attempts is not None:
            self.limited += 1
            if self.limited >= failure.most_attempts:
                return None
        if self.failures >= policy.attempts:
            return None
        pause = policy.wait_seconds(self.failures, failure.retry_after)
        return pause if now + pause - self._progressed_at < policy.deadline_seconds else None

    def conclude(self, failure: TransientFailure) -> SourceError:
        """Return the error to raise, with the history filled in."""
        failure.final.attempts = self.total
        failure.final.elapsed_seconds = self._policy.clock() - self._started_at
        return failure.final


async def call_with_retries(
    operation: Callable[[Attempts], Awaitable[T]],
    policy: RetryPolicy,
    on_retry: Callable[[TransientFailure], None] | None = None,
) -> T:
    """Await ``operation(attempts)`` until it succeeds, fails for good, or the policy gives up.

    Args:
        operation: raises `TransientFailure` when another try makes sense, anything else when not.
        on_retry: told of each failure that will be tried again.

    Raises:
        SourceError: the last failure's `final`, with attempts and elapsed time filled in.
    """
    attempts = Attempts(policy)
    while True:
        attempts.total += 1
        try:
            return await operation(attempts)
        except TransientFailure as failure:
            pause = attempts.pause_after(failure)
            if pause is None:
                raise attempts.conclude(failure) from failure.__cause__
            if on_retry is not None:
                on_retry(failure)
        await policy.sleep(pause)
