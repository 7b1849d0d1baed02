"""Connections are spread over all addresses of a host, and one that is given up leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from streamer.transport.pool import ConnectionPool, Proxy, parse_origin
from tests.certificates import Certificates
from tests.servers import proxy


def accepted(listener: socket.socket) -> int:
    listener.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


def test_connections_are_spread_over_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback has many addresses; the last of these refuses, and the others take its share."""
    listeners = [socket.create_server(("127.0.0.1", 0))]
    port = listeners[0].getsockname()[1]
    listeners += [socket.create_server((f"127.0.0.{number}", port)) for number in (2, 3)]

    def resolve(host: str, *_: Any, **__: Any) -> Any:
        assert host == "store.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{number}", port)) for number in (1, 2, 3, 4)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def run() -> None:
        pool = ConnectionPool(ssl_context=None, connect_timeout_seconds=5)
        origin, _ = parse_origin(f"http://store.example:{port}/bucket")
        opened = [await pool.acquire(origin) for _ in range(12)]
        for connection in opened:
            connection.close()
        pool.close()

    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        asyncio.run(run())
        counts = [accepted(listener) for listener in listeners]
    assert sum(counts) == 12
    assert min(counts) >= 3


@pytest.fixture
def listener(certificates: Certificates) -> Iterator[int]:
    """The port of a server that completes handshakes, and nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server)
    connections: list[socket.socket] = []

    def accept(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listening.accept()
                connections.append(accepted)
                with contextlib.suppress(OSError):  # the client may be gone
                    accepted.settimeout(2)
                    secured = context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
                    connections.append(secured)
                    secured.do_handshake()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, args=(listening,))
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()


def sockets_to(port: int) -> set[str]:
    """Those of this process whose other end is there (the columns of /proc/net/tcp: man 5 proc)."""
    files = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.add(os.readlink(f"/proc/self/fd/{name}"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if int(row[2].partition(":")[2], 16) == port} & files


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("way", ["http", "https", "https through a proxy"])
def test_one_that_is_given_up_at_any_moment_leaves_no_socket(
    listener: int, certificates: Certificates, way: str, new_loop: Any
) -> None:
    """A load that fails cancels what connects; a socket that lingers would take the place of another's."""

    async def run(via: Proxy | None) -> tuple[int, set[str]]:
        pool = ConnectionPool(
            ssl_context=ssl.create_default_context(cafile=certificates.authority), connect_timeout_seconds=5
        )
        origin, _ = parse_origin(f"{way.split()[0]}://127.0.0.1:{listener}/bucket", via)
        given_up = 0
        for rounds in range(200):
            task = asyncio.ensure_future(pool.acquire(origin))
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            try:
                (await task).close()
            except asyncio.CancelledError:
                given_up += 1
        pool.close()
        await asyncio.sleep(0)  # what is aborted is closed in the loop's next round
        return given_up, sockets_to(via.port if via else listener)

    with contextlib.ExitStack() as stack:
        via = None
        if "proxy" in way:
            via = Proxy("127.0.0.1", stack.enter_context(proxy.Proxy()).port)
        seen = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        with asyncio.Runner(loop_factory=new_loop) as runner:
            given_up, left = runner.run(run(via))
        gc.collect()
        assert [str(warning.message) for warning in seen] == []
    assert given_up > 1  # how many moments there are is the machine's; the first is before anything begins
    assert left == set()
