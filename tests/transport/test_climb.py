"""How many requests in flight serve best is found by trying, and what does not help is taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from streamer.config import StreamConfig
from streamer.fetch.buffers import BufferPool
from streamer.fetch.stream import Read, Staged, open_stream
from streamer.sources import open_source
from streamer.transport.climb import Climb
from streamer.transport.pressure import Pressure
from tests.servers.object_server import ObjectServer

MIB = 1 << 20


def climb_in(climb: Climb, rate: Callable[[int], float], seconds: float, *, is_full: bool = True) -> None:
    """Let requests of 8 MiB end as a store that gives `rate` bytes per second to so many requests would have them."""
    now = 0.0
    while now < seconds:
        now += 8 * MIB / rate(climb.limit)
        climb.note(8 * MIB, now, is_full=is_full)


@pytest.mark.parametrize(
    ("link", "expected"), [(20e9, 128), (9e9, 128), (4.5e9, 64), (2.9e9, 32), (1e9, 32)], ids=lambda value: f"{value:g}"
)
def test_it_climbs_until_something_else_is_the_limit(link: float, expected: int) -> None:
    """90 MB/s a connection: 32 come to 2.9 GB/s, 64 to 5.8."""
    climb = Climb(32, 128)
    climb_in(climb, lambda limit: min(limit * 90e6, link), 30)
    assert climb.limit == expected
    climb_in(climb, lambda limit: limit * 90e6, 30)
    assert climb.limit == expected  # the question is asked once


def test_more_that_makes_it_slower_is_taken_back() -> None:
    climb = Climb(32, 128)
    climb_in(climb, lambda limit: 2.9e9 if limit == 32 else 2e9, 30)
    assert climb.limit == 32


def test_requests_that_are_not_the_limit_are_not_doubled() -> None:
    climb = Climb(32, 128)
    climb_in(climb, lambda limit: limit * 90e6, 30, is_full=False)
    assert climb.limit == 32


def test_a_cap_that_is_no_power_of_two() -> None:
    climb = Climb(32, 100)
    climb_in(climb, lambda limit: limit * 90e6, 30)
    assert climb.limit == 100
    climb = Climb(32, 100)
    climb_in(climb, lambda limit: min(limit * 90e6, 6e9), 30)
    assert climb.limit == 64  # what it was before, though half of 100 is less


def test_nothing_above_what_is_asked_for() -> None:
    climb = Climb(64, 32)
    climb_in(climb, lambda limit: limit * 90e6, 30)
    assert climb.limit == 64


def small() -> tuple[Pressure, list[float]]:
    now = [0.0]
    return Pressure(StreamConfig(concurrency=4, max_concurrency=64), lambda: now[0]), now


async def flow(pressure: Pressure, now: list[float], *, is_cpu_bound: bool = False) -> None:
    """More workers than are ever admitted, each of whose requests takes as long as any."""

    async def work() -> None:
        for _ in range(100):
            async with pressure.admitted(MIB):
                await asyncio.sleep(0)
                now[0] += 0.1 / pressure.limit
                pressure.answered(0.03)
                pressure.delivered(MIB, is_cpu_bound=is_cpu_bound)

    await asyncio.gather(*(work() for _ in range(80)))


def test_pressure_follows() -> None:
    pressure, now = small()
    asyncio.run(flow(pressure, now))
    assert pressure.limit == 64
    assert not pressure.is_lowered


def test_a_busy_processor_asks_for_no_more() -> None:
    pressure, now = small()
    asyncio.run(flow(pressure, now, is_cpu_bound=True))
    assert pressure.limit == 4


def test_a_store_that_refuses_is_not_offered_more() -> None:
    pressure, now = small()
    pressure.refused()
    asyncio.run(flow(pressure, now))
    assert pressure.limit == 4  # recovered, and no further


def test_a_load_takes_more_connections_where_each_is_slow() -> None:
    """4 MB/s a connection, so that 64 MiB take two seconds with 8 of them."""
    body, step = bytes(64 * MIB), 256 << 10
    config = StreamConfig(concurrency=8, max_concurrency=64, hedge=False, anonymous=True)

    async def read(url: str) -> int:
        source = open_source("s3://bucket/m", config.replace(endpoint_url=url))
        try:
            (item,) = await source.list()
            reads = [Read(source, item, start, [Staged(0, step)], step) for start in range(0, len(body), step)]
            pool = BufferPool(64 * MIB)
            async with open_stream(reads, pool=pool, concurrency=lambda: max(8, source.stats.concurrency)) as arrivals:
                async for arrival in arrivals:
                    arrival.release()
            return source.stats.concurrency
        finally:
            await source.close()

    with ObjectServer(bytes_per_second=4e6) as server:
        server.put("bucket", "m/a.bin", body)
        assert asyncio.run(read(server.url)) > 16
        assert server.counters.most_open_connections > 16
