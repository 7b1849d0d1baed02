"""Connections are spread over all addresses of a host."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from streamer.transport.pool import ConnectionPool, parse_origin


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
