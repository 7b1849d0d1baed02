"""The retry policy, on a clock of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from streamer.errors import SourceError, SourceUnavailableError
from streamer.transport.retry import Attempts, RetryPolicy, TransientFailure, call_with_retries
from streamer.transport.scatter import Scatter


class Clock:
    """Time passes only when somebody sleeps, or says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def policy(clock: Clock, *, jitter: float = 1.0, attempts: int = 5, deadline: float = 1000.0) -> RetryPolicy:
    return RetryPolicy(
        attempts=attempts,
        deadline_seconds=deadline,
        first_wait_seconds=1.0,
        longest_wait_seconds=4.0,
        clock=lambda: clock.now,
        sleep=clock.sleep,
        rng=lambda low, high: low + (high - low) * jitter,
    )


def failure(**options: object) -> TransientFailure:
    return TransientFailure(SourceUnavailableError("no"), **options)  # type: ignore[arg-type]


def failing(times: int, **options: object) -> Callable[[Attempts], Awaitable[str]]:
    left = times

    async def operation(attempts: Attempts) -> str:
        nonlocal left
        if left:
            left -= 1
            raise failure(**options)
        return f"done after {attempts.total}"

    return operation


def test_success_needs_no_wait() -> None:
    clock = Clock()
    assert asyncio.run(call_with_retries(failing(0), policy(clock))) == "done after 1"
    assert clock.slept == []


@pytest.mark.parametrize(("jitter", "waits"), [(1.0, [1, 2, 4, 4]), (0.0, [0, 0, 0, 0]), (0.5, [0.5, 1, 2, 2])])
def test_waits_double_up_to_the_cap_with_full_jitter(jitter: float, waits: list[float]) -> None:
    clock = Clock()
    asyncio.run(call_with_retries(failing(4), policy(clock, jitter=jitter)))
    assert clock.slept == waits


def test_gives_up_after_the_attempts_with_the_history() -> None:
    clock = Clock()
    with pytest.raises(SourceUnavailableError) as caught:
        asyncio.run(call_with_retries(failing(99), policy(clock)))
    assert (caught.value.attempts, caught.value.elapsed_seconds) == (5, 11.0)
    assert "5 attempts in 11.0 s" in str(caught.value)


def test_gives_up_before_the_deadline_would_pass() -> None:
    clock = Clock()
    with pytest.raises(SourceUnavailableError):
        asyncio.run(call_with_retries(failing(99), policy(clock, attempts=99, deadline=6.0)))
    assert clock.now <= 6.0
    assert clock.slept == [1, 2]


def test_retry_after_is_waited_for_and_counts_against_the_deadline() -> None:
    clock = Clock()
    asyncio.run(call_with_retries(failing(1, retry_after=30.0), policy(clock)))
    assert clock.slept == [31.0]
    with pytest.raises(SourceUnavailableError):
        asyncio.run(call_with_retries(failing(1, retry_after=3000.0), policy(clock)))
    assert clock.slept == [31.0]


def test_unlikely_answers_get_fewer_attempts() -> None:
    with pytest.raises(SourceUnavailableError) as caught:
        asyncio.run(call_with_retries(failing(99, most_attempts=2), policy(Clock())))
    assert caught.value.attempts == 2


def test_other_failures_do_not_use_up_the_fewer_attempts() -> None:
    kinds = [{}, {}, {"most_attempts": 2}, {}]

    async def operation(attempts: Attempts) -> str:
        if kinds:
            raise failure(**kinds.pop(0))
        return f"done after {attempts.total}"

    assert asyncio.run(call_with_retries(operation, policy(Clock()))) == "done after 5"


def test_a_stale_connection_costs_neither_wait_nor_attempt_but_is_bounded() -> None:
    clock = Clock()
    assert asyncio.run(call_with_retries(failing(3, free=True), policy(clock))) == "done after 4"
    assert clock.slept == [0, 0, 0]
    with pytest.raises(SourceUnavailableError):
        asyncio.run(call_with_retries(failing(99, free=True), policy(clock)))


def test_progress_starts_the_count_and_the_deadline_anew() -> None:
    clock = Clock()
    tries = 0

    async def operation(attempts: Attempts) -> str:
        nonlocal tries
        tries += 1
        if tries <= 50:
            attempts.progressed = True
            raise failure()
        return "done"

    assert asyncio.run(call_with_retries(operation, policy(clock, deadline=5.0))) == "done"
    assert set(clock.slept) == {1.0}


def test_permanent_errors_pass_at_once() -> None:
    async def operation(attempts: Attempts) -> None:
        raise SourceError("denied")

    clock = Clock()
    with pytest.raises(SourceError, match="denied"):
        asyncio.run(call_with_retries(operation, policy(clock)))
    assert clock.slept == []


def test_scatter_fills_segments_in_order() -> None:
    first, second = bytearray(3), bytearray(5)
    scatter = Scatter([memoryview(first), memoryview(b""), memoryview(second)])
    assert scatter.length == 8
    scatter.write(b"abcd")
    assert (bytes(first), bytes(second[:1]), scatter.remaining) == (b"abc", b"d", 4)
    assert [len(segment) for segment in scatter.rest()] == [4]
    scatter.view[:2] = b"ef"
    scatter.advance(2)
    scatter.write(b"gh")
    assert (bytes(second), scatter.remaining, scatter.rest()) == (b"defgh", 0, [])
