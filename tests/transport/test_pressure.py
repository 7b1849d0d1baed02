"""The number of requests in flight follows the store; caps hold; nobody who is cancelled keeps a place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from streamer.config import StreamConfig
from streamer.errors import ConfigError
from streamer.transport.pressure import Pressure


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pressure(clock: Clock | None = None, **options: Any) -> Pressure:
    return Pressure(StreamConfig(**{"concurrency": 32, **options}), clock or Clock())


def test_a_refusal_lowers_the_limit_once_per_round() -> None:
    clock = Clock()
    store = pressure(clock)
    for _ in range(100):
        store.answered(0.05)
    assert store.limit == 32
    for _ in range(32):  # all that were under way are refused
        store.refused()
    assert store.limit == 21
    clock.now += 0.1
    store.refused()
    assert store.limit == 14
    assert store.throttled == 33


def test_answers_in_time_raise_it_by_one_per_round() -> None:
    clock = Clock()
    store = pressure(clock)
    for _ in range(40):
        clock.now += 1
        store.refused()
    assert store.limit == 1
    for expected in range(2, 12):
        for _ in range(expected):
            store.answered(0.05)
        assert store.limit in (expected, expected - 1)
    for _ in range(5000):
        store.answered(0.05)
    assert store.limit == 32  # and never more


def test_slow_answers_lower_it_gently_and_not_for_ever() -> None:
    clock = Clock()
    store = pressure(clock)
    for _ in range(50):
        store.answered(0.03)
    for _ in range(200):
        clock.now += 1
        store.answered(0.5)
    assert store.limit == 8  # a quarter: a full link makes answers slow too
    for _ in range(3000):
        clock.now += 1
        store.answered(0.5)
    assert store.limit == 32  # it has become the usual


def test_a_little_jitter_changes_nothing() -> None:
    clock = Clock()
    store = pressure(clock)
    for number in range(1000):
        clock.now += 1
        store.answered(0.001 + 0.02 * (number % 5))
    assert store.limit == 32


async def run_requests(store: Pressure, count: int, seconds: float, seen: list[int]) -> None:
    running = 0

    async def request() -> None:
        nonlocal running
        async with store.admitted(100):
            running += 1
            seen.append(running)
            await asyncio.sleep(seconds)
            running -= 1

    await asyncio.gather(*(request() for _ in range(count)))


def test_no_more_are_in_flight_than_the_limit() -> None:
    store = pressure(concurrency=3)
    seen: list[int] = []
    asyncio.run(run_requests(store, 20, 0.001, seen))
    assert max(seen) == 3
    assert len(seen) == 20


def test_loops_of_a_process_share_it() -> None:
    store = pressure(concurrency=4)
    lock, running, most = threading.Lock(), [0], [0]

    async def request() -> None:
        async with store.admitted(1):
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            await asyncio.sleep(0.002)
            with lock:
                running[0] -= 1

    async def many() -> None:
        await asyncio.gather(*(request() for _ in range(30)))

    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] == 4


def test_whoever_is_cancelled_gives_its_place_away() -> None:
    store = pressure(concurrency=1)

    async def run() -> None:
        entered = asyncio.Event()

        async def hold() -> None:
            async with store.admitted(1):
                entered.set()
                await asyncio.sleep(60)

        async def pass_through() -> None:
            async with store.admitted(1):
                pass

        holder = asyncio.ensure_future(hold())
        await entered.wait()
        waiting = [asyncio.ensure_future(pass_through()) for _ in range(4)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # while it waits
        holder.cancel()
        await asyncio.sleep(0)
        waiting[1].cancel()  # when it may be its turn already
        await asyncio.wait_for(asyncio.gather(*waiting[2:]), 5)
        await asyncio.wait_for(pass_through(), 5)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_requests_per_second": 10.0}, [0, 0.1, 0.2, 0.3]),
        ({"max_bytes_per_second": 1000}, [0, 0.5, 1.0, 1.5]),
        ({"max_requests_per_second": 4.0, "max_bytes_per_second": 1000}, [0, 0.5, 1.0, 1.5]),
        ({}, [0, 0, 0, 0]),
    ],
)
def test_caps_space_requests(
    options: dict[str, Any], expected: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    store = pressure(**options)

    async def run() -> None:
        for _ in range(4):
            async with store.admitted(500):
                pass

    monkeypatch.setattr("streamer.transport.pressure.asyncio.sleep", note)
    asyncio.run(run())
    assert [0.0] * (4 - len(slept)) + slept == pytest.approx(expected)


@pytest.mark.parametrize("options", [{"max_requests_per_second": 0.0}, {"max_bytes_per_second": -1}])
def test_caps_are_positive(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a positive number or nothing"):
        StreamConfig(**options)
