"""The fetch engine against a recording fake, with gates instead of sleeps."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass, field

import pytest
import torch

from streamer.config import StreamConfig
from streamer.errors import SourceError, StreamError
from streamer.fetch.budget import ByteBudget
from streamer.fetch.buffers import BufferPool
from streamer.fetch.engine import FetchEngine, request_bytes_for
from streamer.fetch.stream import Arrival, Direct, Discard, Read, Staged, open_stream
from streamer.sources.base import ObjectInfo
from streamer.sources.memory import MemorySource
from streamer.transport.loop import LoopThread
from streamer.transport.stats import TransferStats

KIB = 1024
ITEM = ObjectInfo("object", 1 << 40, "pin")


@dataclass
class FakeSource:
    """Byte i is i mod 251; records what is asked, waits at gates, fails on a predicate."""

    fails: Callable[[int], bool] = lambda start: False
    gate: asyncio.Event | None = None
    started: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    active: int = 0
    most_active: int = 0
    url: str = "fake://"
    stats: TransferStats = field(default_factory=TransferStats)

    async def list(self) -> Sequence[ObjectInfo]:
        return [ITEM]

    async def stat(self, key: str, version: str | None = None) -> ObjectInfo:
        return ITEM

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        self.started.append(start)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            if self.fails(start):
                raise SourceError(f"failed at {start}")
            for buffer in buffers:
                buffer[:] = bytes((start + k) % 251 for k in range(len(buffer)))
                start += len(buffer)
            self.finished.append(start)
        except asyncio.CancelledError:
            self.cancelled.append(start)
            raise
        finally:
            self.active -= 1

    async def close(self) -> None:
        pass

    def label(self, key: str) -> str:
        return key


def expected(start: int, count: int) -> bytes:
    return bytes((start + k) % 251 for k in range(count))


def staged(source: FakeSource, count: int, size: int = 64 * KIB) -> list[Read]:
    return [Read(source, ITEM, n * size, [Staged(0, size)], size, n) for n in range(count)]


def stream_of(
    reads: list[Read], pool: BufferPool, concurrency: int
) -> AbstractAsyncContextManager[AsyncIterator[Arrival]]:
    return open_stream(reads, pool=pool, concurrency=lambda: concurrency)


async def collect(reads: list[Read], pool: BufferPool, concurrency: int = 4) -> dict[int, bytes]:
    found = {}
    async with stream_of(reads, pool, concurrency) as stream:
        async for arrival in stream:
            assert arrival.buffer is not None
            found[arrival.tag] = bytes(arrival.buffer.memory[: reads[arrival.tag].staged_bytes])
            arrival.release()
    return found


def test_everything_arrives_within_the_cap_and_the_concurrency() -> None:
    source, pool = FakeSource(), BufferPool(3 * 64 * KIB)
    found = asyncio.run(collect(staged(source, 50), pool, concurrency=8))
    assert found == {n: expected(n * 64 * KIB, 64 * KIB) for n in range(50)}
    assert source.started == sorted(source.started), "reads start in the order given"
    assert 2 <= source.most_active <= 3
    assert pool.peak_bytes <= 3 * 64 * KIB
    assert pool.in_use_bytes == 0


def test_segments_go_where_they_belong() -> None:
    target = bytearray(100)
    read = Read(
        FakeSource(),
        ITEM,
        10,
        [Direct(memoryview(target)), Discard(200_000), Staged(128, 50), Direct(memoryview(target)[:0])],
        178,
    )

    async def run() -> bytes:
        async with stream_of([read], BufferPool(1 << 20), 2) as stream:
            async for arrival in stream:
                assert arrival.buffer is not None
                kept = bytes(arrival.buffer.memory[128:178])
                arrival.release()
        return kept

    assert asyncio.run(run()) == expected(10 + 100 + 200_000, 50)
    assert target == expected(10, 100)


def test_budget_is_held_until_the_consumer_lets_go() -> None:
    async def run() -> None:
        source, pool = FakeSource(), BufferPool(4 * 64 * KIB)
        held: list[Arrival] = []
        async with stream_of(staged(source, 200), pool, 32) as stream:
            async for arrival in stream:
                held.append(arrival)
                if len(held) == 4:
                    break
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(source.started) == 4, "more was fetched than the consumer let go of"
            held.pop().release()
            async for arrival in stream:
                held.append(arrival)
                break
            assert len(source.started) == 5

    asyncio.run(run())


def test_first_failure_is_seen_as_itself_and_ends_everything() -> None:
    async def run() -> None:
        source = FakeSource(fails=lambda start: start == 5 * 64 * KIB)
        pool = BufferPool(1 << 20)
        with pytest.raises(SourceError, match=f"failed at {5 * 64 * KIB}"):
            await collect(staged(source, 100), pool)
        assert source.active == 0
        assert pool.in_use_bytes == 0
        assert len(source.started) < 20
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_consumer_error_is_seen_as_itself() -> None:
    async def run() -> None:
        source, pool = FakeSource(), BufferPool(1 << 20)
        with pytest.raises(ZeroDivisionError):
            async with stream_of(staged(source, 100), pool, 4) as stream:
                async for _ in stream:
                    raise ZeroDivisionError
        assert source.active == 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_early_exit_cancels_and_waits() -> None:
    async def run() -> None:
        source, pool = FakeSource(gate=asyncio.Event()), BufferPool(1 << 20)
        async with stream_of(staged(source, 100), pool, 4):
            while len(source.started) < 4:
                await asyncio.sleep(0)
        assert source.active == 0
        assert len(source.cancelled) == 4
        assert pool.in_use_bytes == 0

    asyncio.run(run())


def test_budget_is_first_come_first_served_and_admits_oversize_alone() -> None:
    async def run() -> None:
        budget = ByteBudget(10)
        await budget.acquire(8)
        big = asyncio.ensure_future(budget.acquire(100))
        small = asyncio.ensure_future(budget.acquire(1))
        await asyncio.sleep(0)
        assert not big.done()
        assert not small.done(), "a small one would starve the large one before it"
        budget.release(8)
        await asyncio.sleep(0)
        assert big.done()
        assert not small.done()
        budget.release(100)
        await small
        assert (budget.used, budget.peak) == (1, 100)
        assert repr(budget) == "<ByteBudget 1 of 10 used, 0 waiting>"

    asyncio.run(run())


@pytest.mark.parametrize("admit_first", [False, True])
def test_budget_survives_cancelled_waiters(admit_first: bool) -> None:
    async def run() -> None:
        budget = ByteBudget(10)
        await budget.acquire(10)
        waiting = asyncio.ensure_future(budget.acquire(10))
        behind = asyncio.ensure_future(budget.acquire(5))
        await asyncio.sleep(0)
        if admit_first:
            budget.release(10)  # admitted and cancelled in the same turn
            waiting.cancel()
        else:
            waiting.cancel()
            await asyncio.sleep(0)
            budget.release(10)
        await asyncio.gather(waiting, return_exceptions=True)
        await behind
        assert budget.used == 5

    asyncio.run(run())


def test_buffers_are_reused_and_other_sizes_make_room() -> None:
    async def run() -> None:
        pool = BufferPool(256 * KIB)
        first = await pool.acquire(100 * KIB)
        assert first.nbytes == 128 * KIB
        address = first.tensor.data_ptr()
        pool.release(first)
        again = await pool.acquire(128 * KIB)
        assert again.tensor.data_ptr() == address
        pool.release(again)
        large = await pool.acquire(256 * KIB)  # the free one must go first
        assert pool.peak_bytes == 256 * KIB
        pool.release(large)

    asyncio.run(run())


def test_pinning_that_fails_is_one_warning_and_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, device: torch.device) -> None:
            raise RuntimeError("memlock")

    monkeypatch.setattr(torch.cuda, "device", Refusing)

    async def run() -> None:
        pool = BufferPool(1 << 20)
        pool.pin_for = torch.device("cuda")
        with pytest.warns(UserWarning, match="cannot be pinned.*memlock"):
            assert (await pool.acquire(1)).nbytes == 64 * KIB
        assert (await pool.acquire(1)).nbytes == 64 * KIB

    asyncio.run(run())


@pytest.mark.parametrize(
    ("cap", "concurrency", "most"),
    [
        (1 << 30, 32, 8 << 20),
        (64 << 20, 32, 2 << 20),
        (16 << 20, 32, 1 << 20),
        (100_000, 32, 65536),
        (1 << 30, 4, 8 << 20),
    ],
)
def test_requests_shrink_with_the_cap(cap: int, concurrency: int, most: int) -> None:
    size = request_bytes_for(StreamConfig(buffer_bytes=cap, concurrency=concurrency))
    assert most * 0.97 < size < most


def test_loop_thread_works_under_a_running_loop_and_from_many_threads() -> None:
    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return a + b

    async def inside() -> int:
        with LoopThread() as loop:
            return loop.run(add(1, 2))  # blocks this loop, not the other one

    assert asyncio.run(inside()) == 3
    results = []
    with LoopThread() as loop:
        threads = [threading.Thread(target=lambda: results.append(loop.run(add(3, 4)))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [7] * 8


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_loop_thread_iterates_and_is_left_early(use_uvloop: bool) -> None:
    source = FakeSource()
    pool = BufferPool(1 << 20)
    with LoopThread(use_uvloop=use_uvloop) as loop:
        with closing(loop.iterate(lambda: stream_of(staged(source, 100), pool, 4))) as arrivals:
            for number, arrival in enumerate(arrivals):
                if number == 3:
                    break
                loop.call_soon(arrival.release)
        assert source.active == 0
        assert len(source.started) < 30
        again = loop.iterate(lambda: stream_of(staged(source, 2), BufferPool(1 << 20), 1))
        assert [arrival.tag for arrival in again] == [0, 1]


def test_loop_thread_closed_while_an_iterator_is_open() -> None:
    loop = LoopThread()
    arrivals = loop.iterate(lambda: stream_of(staged(FakeSource(gate=asyncio.Event()), 3), BufferPool(1 << 20), 2))
    closer = threading.Timer(0.1, loop.close)
    closer.start()
    assert list(arrivals) == []
    closer.join()


def test_threads_and_tasks_are_gone_afterwards() -> None:
    before = threading.active_count()
    for _ in range(5):
        with FetchEngine(MemorySource({"a": b"x"}), StreamConfig()) as engine:
            assert engine.read_object("a", limit_bytes=10) == b"x"
        engine.close()
    gc.collect()
    assert threading.active_count() == before


def _in_child(engine: FetchEngine, results: multiprocessing.connection.Connection) -> None:
    try:
        engine.read_object("a", limit_bytes=10)
    except StreamError as error:
        results.send(str(error))
    engine.close()  # inert, and does not hang
    with FetchEngine(MemorySource({"a": b"child"}), StreamConfig()) as fresh:
        results.send(fresh.read_object("a", limit_bytes=10))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_after_fork_the_child_opens_its_own() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with FetchEngine(MemorySource({"a": b"x"}), StreamConfig()) as engine:
        engine.read_object("a", limit_bytes=10)
        child = context.Process(target=_in_child, args=(engine, there))
        child.start()
        assert here.poll(10), "the child hangs"
        assert "before a fork" in here.recv()
        assert here.poll(10)
        assert here.recv() == b"child"
        child.join(10)
        assert child.exitcode == 0
        assert engine.read_object("a", limit_bytes=10) == b"x"
