"""Bodies are received in more event loops when one is the limit, and nothing of that shows."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import ssl
import threading
import time
from collections.abc import Iterator

import pytest

from streamer.config import StreamConfig
from streamer.errors import ConfigError, SourceUnavailableError
from streamer.sources import open_source
from streamer.transport.lanes import Lanes, most_lanes
from streamer.transport.pool import ConnectionPool
from tests.certificates import Certificates
from tests.servers.object_server import Fault, ObjectServer, Request, Response

MIB = 1 << 20

open_pool = functools.partial(ConnectionPool, ssl_context=None, connect_timeout_seconds=5)


def lanes(most: int, busy_share: float = 0.0) -> Lanes:
    """Lanes for which any thread counts as busy."""
    return Lanes(open_pool, most=most, busy_share=busy_share)


async def grow(to: Lanes, count: int) -> None:
    async def nothing(pool: ConnectionPool) -> None:
        pass

    deadline = time.monotonic() + 10
    while to.count < count:
        assert time.monotonic() < deadline
        await to.run(MIB, nothing)
        await asyncio.sleep(0.05)


async def where(_: ConnectionPool) -> str:
    await asyncio.sleep(0.01)
    return threading.current_thread().name


def test_reads_are_spread_over_the_loops_and_short_ones_are_not() -> None:
    async def run() -> tuple[list[str], list[str]]:
        some = lanes(3)
        await grow(some, 3)
        long = await asyncio.gather(*(some.run(2 * MIB, where) for _ in range(9)))
        short = await asyncio.gather(*(some.run(1000, where) for _ in range(9)))
        some.close()
        return long, short

    long, short = asyncio.run(run())
    home = threading.current_thread().name
    assert long.count(home) == 3
    assert set(short) == {home}
    assert not any(thread.name == "s3stream-loop" for thread in threading.enumerate())


def test_each_loop_has_its_own_connections() -> None:
    async def run() -> list[ConnectionPool]:
        some = lanes(2)
        await grow(some, 2)
        pools: list[ConnectionPool] = []

        async def note(pool: ConnectionPool) -> None:
            pools.append(pool)
            await asyncio.sleep(0.01)

        await asyncio.gather(*(some.run(MIB, note) for _ in range(4)))
        some.close()
        return pools

    assert len({id(pool) for pool in asyncio.run(run())}) == 2


def test_an_idle_loop_is_not_the_limit() -> None:
    async def run() -> int:
        some = lanes(4, busy_share=0.85)

        async def wait(_: ConnectionPool) -> None:
            await asyncio.sleep(0.3)

        for _ in range(3):
            await some.run(MIB, wait)
        count = some.count
        some.close()
        return count

    assert asyncio.run(run()) == 1


def test_a_busy_loop_is() -> None:
    async def run() -> int:
        some = lanes(2, busy_share=0.3)  # the machine may have others to serve

        async def compute(_: ConnectionPool) -> None:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                hashlib.sha256(b"x" * 1000).digest()

        for _ in range(5):
            await some.run(MIB, compute)
        count = some.count
        some.close()
        return count

    assert asyncio.run(run()) == 2


def test_errors_come_home() -> None:
    async def run() -> None:
        some = lanes(2)
        await grow(some, 2)

        async def fail(_: ConnectionPool) -> None:
            await asyncio.sleep(0.01)
            raise LookupError(threading.current_thread().name)

        outcomes = await asyncio.gather(*(some.run(MIB, fail) for _ in range(4)), return_exceptions=True)
        some.close()
        assert [type(outcome) for outcome in outcomes] == [LookupError] * 4
        assert len({str(outcome) for outcome in outcomes}) == 2

    asyncio.run(run())


def test_a_cancelled_read_has_ended_when_the_caller_goes_on() -> None:
    """Or it would write to memory that has a new owner."""

    async def run() -> None:
        some = lanes(2)
        await grow(some, 2)
        under_way, ended = threading.Semaphore(0), threading.Semaphore(0)

        async def linger(_: ConnectionPool) -> None:
            under_way.release()
            try:
                await asyncio.sleep(60)
            finally:
                time.sleep(0.1)
                ended.release()

        tasks = [asyncio.ensure_future(some.run(MIB, linger)) for _ in range(2)]
        while not all(under_way.acquire(blocking=False) for _ in range(2)):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()  # once more, while it ends
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
        assert all(ended.acquire(blocking=False) for _ in range(2))
        some.close()

    asyncio.run(run())


def test_no_more_loops_than_files_may_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> asyncio.AbstractEventLoop:
        raise OSError(24, "Too many open files")

    async def run() -> int:
        some = lanes(3)
        monkeypatch.setattr(asyncio, "new_event_loop", refuse)
        for _ in range(3):
            await some.run(MIB, where)
            await asyncio.sleep(0.25)
        monkeypatch.undo()
        count = some.count
        some.close()
        return count

    assert asyncio.run(run()) == 1


def test_the_option() -> None:
    assert most_lanes(5) == 5
    assert 1 <= most_lanes(None) <= 8
    with pytest.raises(ConfigError, match="receive_loops must be at least 1"):
        StreamConfig(receive_loops=0)


BODY = b"".join(hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(1 << 20))  # 32 MiB


@pytest.fixture(params=["http", "https"])
def store(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[ObjectServer]:
    context = None
    if request.param == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.server)
    with ObjectServer(require_signature=True, tls=context) as server:
        server.put("bucket", "m/a.bin", BODY)
        yield server


async def read_all(server: ObjectServer, ca_bundle: str, use_uvloop: bool) -> tuple[bytes, int]:
    config = StreamConfig(
        endpoint_url=server.url,
        receive_loops=3,
        ca_bundle=ca_bundle,
        use_uvloop=use_uvloop,
        retry_first_wait_seconds=0.01,
        retry_attempts=3,
    )
    source = open_source("s3://bucket/m", config)
    threads = 0
    try:
        (item,) = await source.list()
        buffer = bytearray(item.size)
        step = 2 * MIB
        for _ in range(2):  # the second time, all loops have connections
            buffer[:] = bytes(len(buffer))
            reads = (
                source.read_into(item, start, [memoryview(buffer)[start : start + step]])
                for start in range(0, item.size, step)
            )
            await asyncio.gather(*reads)
            threads = sum(thread.name == "s3stream-loop" for thread in threading.enumerate())
        return bytes(buffer), threads
    finally:
        await source.close()


@pytest.fixture
def all_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.transport.lanes._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("streamer.transport.lanes.Lanes", functools.partial(Lanes, busy_share=0.0))


@pytest.mark.usefixtures("all_busy")
@pytest.mark.parametrize("use_uvloop", [False, True])
def test_bytes_are_the_same(store: ObjectServer, certificates: Certificates, use_uvloop: bool) -> None:
    body, threads = asyncio.run(read_all(store, str(certificates.authority), use_uvloop))
    assert body == BODY
    assert threads == 2


@pytest.mark.usefixtures("all_busy")
def test_faults_are_survived_in_every_loop(store: ObjectServer, certificates: Certificates) -> None:
    seen: set[str] = set()

    def cut(request: Request, response: Response) -> None:
        end = request.headers["range"].partition("-")[2]  # which a read that is resumed keeps
        if end not in seen:
            seen.add(end)
            response.cut_after = 300_000

    store.faults.append(Fault(cut, times=None))
    body, _ = asyncio.run(read_all(store, str(certificates.authority), False))
    assert body == BODY
    assert len(seen) == 16


@pytest.mark.usefixtures("all_busy")
def test_a_store_that_never_mends_is_given_up(store: ObjectServer, certificates: Certificates) -> None:
    def cut(request: Request, response: Response) -> None:
        response.cut_after = 1000

    store.faults.append(Fault(cut, times=None))
    with pytest.raises(SourceUnavailableError, match="a.bin.*bytes"):
        asyncio.run(read_all(store, str(certificates.authority), False))
