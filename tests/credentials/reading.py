"""A whole visit to a store: list, head, bodies."""

from __future__ import annotations

import asyncio

from streamer.config import StreamConfig
from streamer.sources import Source, open_source
from tests.credentials.conftest import BODY
from tests.servers.object_server import ObjectServer

PIECES = 4


def open_for(server: ObjectServer, **options: object) -> Source:
    config = StreamConfig.resolve(
        {
            "endpoint_url": server.url,
            "retry_attempts": 2,
            "retry_first_wait_seconds": 0.01,
            "retry_longest_wait_seconds": 0.02,
            "connect_timeout_seconds": 5.0,
            **options,
        }
    )
    return open_source("s3://bucket/m", config)


async def visit(source: Source) -> None:
    """List, head, and read everything in parallel pieces."""
    (item,) = await source.list()
    assert await source.stat("a.bin") == item
    await read(source)


async def read(source: Source) -> None:
    item = await source.stat("a.bin")
    buffer = bytearray(item.size)
    step = item.size // PIECES
    await asyncio.gather(
        *(
            source.read_into(item, start, [memoryview(buffer)[start : start + step]])
            for start in range(0, item.size, step)
        )
    )
    assert buffer == BODY


def visit_once(server: ObjectServer, **options: object) -> None:
    async def run() -> None:
        source = open_for(server, **options)
        try:
            await visit(source)
        finally:
            await source.close()

    asyncio.run(run())
