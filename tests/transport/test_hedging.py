"""Slow reads are asked for twice; answers are never mixed, and nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import safetensors.torch
import torch

import streamer
from streamer.config import StreamConfig
from streamer.errors import SourceError, SourceUnavailableError
from streamer.sources import open_source
from streamer.transport.hedging import Hedging
from streamer.transport.pressure import Pressure
from streamer.transport.stats import TransferStats
from tests.servers.object_server import Fault, ObjectServer, Response

Read = Callable[[int, Sequence[memoryview]], Awaitable[None]]


def hedging(**options: Any) -> tuple[Hedging, TransferStats]:
    stats, config = TransferStats(), StreamConfig(**{"hedge_after_seconds": 0.02, **options})
    return Hedging(config, stats, Pressure(config)), stats


async def warm_up(hedge: Hedging) -> None:
    async def quick(start: int, buffers: Sequence[memoryview]) -> None:
        pass

    for _ in range(8):
        await hedge.read(quick, 0, [])


class Script:
    """The first call does one thing, the second another; both write what they are, piece by piece."""

    def __init__(self, first: Callable[[], Awaitable[None]], second: Callable[[], Awaitable[None]]) -> None:
        self._acts = [first, second]
        self.calls = 0
        self.running = 0

    async def __call__(self, start: int, buffers: Sequence[memoryview]) -> None:
        self.calls += 1
        mark = self.calls
        self.running += 1
        try:
            for buffer in buffers:
                buffer[:1] = bytes([mark])
            await self._acts[mark - 1]()
            for buffer in buffers:
                buffer[:] = bytes([mark]) * len(buffer)
        finally:
            self.running -= 1


async def soon() -> None:
    await asyncio.sleep(0.001)


async def late() -> None:
    await asyncio.sleep(0.06)


async def never() -> None:
    await asyncio.sleep(60)


def failing(seconds: float) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        await asyncio.sleep(seconds)
        raise SourceUnavailableError("gone", url="x")

    return fail


def play(
    first: Callable[[], Awaitable[None]], second: Callable[[], Awaitable[None]]
) -> tuple[bytes, Script, TransferStats]:
    hedge, stats = hedging()
    script = Script(first, second)

    async def run() -> bytes:
        await warm_up(hedge)
        memory = bytearray(10)
        view = memoryview(memory)
        await asyncio.wait_for(hedge.read(script, 5, [view[:3], view[3:]]), 5)
        found = bytes(memory)
        assert not script.running
        await asyncio.sleep(0.08)
        assert bytes(memory) == found  # whoever lost writes no more
        return found

    return asyncio.run(run()), script, stats


def test_a_read_that_hangs_is_replaced() -> None:
    found, script, stats = play(never, soon)
    assert found == b"\2" * 10
    assert (script.calls, stats.hedges) == (2, 1)


def test_the_first_to_come_counts() -> None:
    found, script, _ = play(late, never)
    assert found == b"\1" * 10
    assert script.calls == 2


def test_quick_reads_are_not_hedged() -> None:
    found, script, stats = play(soon, never)
    assert found == b"\1" * 10
    assert (script.calls, stats.hedges) == (1, 0)


def test_a_failure_waits_for_the_duplicate() -> None:
    assert play(failing(0.04), late)[0] == b"\2" * 10


def test_a_duplicate_that_fails_changes_nothing() -> None:
    assert play(late, failing(0.001))[0] == b"\1" * 10


def test_when_both_fail_the_read_fails() -> None:
    with pytest.raises(SourceError, match="gone"):
        play(failing(0.04), failing(0.06))


def test_nothing_is_hedged_before_it_is_known_what_is_usual_or_when_it_is_off() -> None:
    fresh, _ = hedging()
    off, _ = hedging(hedge=False)

    async def run() -> None:
        assert fresh.patience() is None
        await warm_up(fresh)
        await warm_up(off)
        assert fresh.patience() == 0.02
        assert off.patience() is None

    asyncio.run(run())


def test_a_store_that_is_asked_too_much_is_not_asked_twice() -> None:
    config = StreamConfig(hedge_after_seconds=0.02)
    pressure = Pressure(config)
    hedge = Hedging(config, TransferStats(), pressure)

    async def run() -> None:
        await warm_up(hedge)
        assert hedge.patience() is not None
        pressure.refused()
        assert hedge.patience() is None

    asyncio.run(run())


def test_patience_follows_the_usual_duration() -> None:
    hedge, _ = hedging(hedge_after_seconds=0.001)

    async def run() -> None:
        script = [0.02] * 12
        for seconds in script:

            async def slow(start: int, buffers: Sequence[memoryview], seconds: float = seconds) -> None:
                await asyncio.sleep(seconds)

            await hedge.read(slow, 0, [])
        patience = hedge.patience()
        assert patience is not None
        assert 0.02 < patience < 0.2

    asyncio.run(run())


def test_at_most_two_duplicates_at_once() -> None:
    hedge, stats = hedging()

    async def run() -> None:
        await warm_up(hedge)
        calls = 0

        async def hang(start: int, buffers: Sequence[memoryview]) -> None:
            nonlocal calls
            calls += 1
            await asyncio.sleep(0.1)

        await asyncio.gather(*(hedge.read(hang, 0, []) for _ in range(20)))
        assert calls == 22

    asyncio.run(run())
    assert stats.hedges == 2


@pytest.mark.parametrize("after", [0.0, 0.05])
def test_cancelling_stops_both(after: float) -> None:
    hedge, _ = hedging()
    script = Script(never, never)

    async def run() -> None:
        await warm_up(hedge)
        reading = asyncio.ensure_future(hedge.read(script, 0, [memoryview(bytearray(4))]))
        await asyncio.sleep(after)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not script.running
        assert reading.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_a_stalled_answer_of_a_store_costs_seconds_not_the_time_out(server: ObjectServer, transport: str) -> None:
    state = {f"t{number}": torch.randn(64, 1024) for number in range(16)}
    server.put("b", "m/model.safetensors", safetensors.torch.save(state))

    def stall(_: object, response: Response) -> None:
        response.stall_after = 1000

    server.faults = [Fault(stall, skip=12)]
    options = {
        "endpoint_url": server.url,
        "transport": transport,
        "idle_timeout_seconds": 20.0,
        "hedge_after_seconds": 0.3,
        "request_bytes": 128 << 10,
        "concurrency": 2,
    }
    model = torch.nn.Module()
    for name, value in state.items():
        model.register_parameter(name, torch.nn.Parameter(torch.zeros_like(value), requires_grad=False))
    report = streamer.load(model, open_source("s3://b/m", StreamConfig.resolve(options)), options)
    assert all(torch.equal(getattr(model, name), value) for name, value in state.items())
    assert report.hedges == 1
    assert report.retries == 0
    assert report.times.total < 10
