"""A listing made elsewhere: nothing is listed again, and what changed since is refused."""

from __future__ import annotations

import asyncio

import pytest

from streamer.config import StreamConfig
from streamer.errors import ObjectChangedError, ObjectNotFoundError
from streamer.sources import open_source
from streamer.sources.pinned import PinnedSource
from tests.servers.object_server import ObjectServer


def test_ranks_read_what_was_listed_and_list_nothing(server: ObjectServer) -> None:
    server.put("b", "m/one.bin", b"1111")
    server.put("b", "m/two.bin", b"2222")
    config = StreamConfig(endpoint_url=server.url)

    async def run() -> None:
        first = open_source("s3://b/m", config)
        items = await first.list()
        await first.close()
        listings = server.counters.requests["LIST"]
        server.put("b", "m/three.bin", b"3333")
        source = PinnedSource(open_source("s3://b/m", config), items)
        assert await source.list() == list(items)
        assert server.counters.requests["LIST"] == listings
        body = bytearray(2)
        await source.read_into(await source.stat("two.bin"), 1, [memoryview(body)])
        assert body == b"22"
        assert source.stats.bytes_received == 2
        with pytest.raises(ObjectNotFoundError, match=r"s3://b/m/three\.bin.*not there when the model was resolved"):
            await source.stat("three.bin")
        server.put("b", "m/two.bin", b"9999")
        with pytest.raises(ObjectChangedError):
            await source.read_into(await source.stat("two.bin"), 0, [memoryview(bytearray(4))])
        server.put("b", "m/one.bin", b"8888")
        with pytest.raises(ObjectChangedError, match="replaced since the model was resolved"):
            await source.list()
        await source.close()

    asyncio.run(run())


def test_an_empty_listing_asks_nobody(server: ObjectServer) -> None:
    async def run() -> None:
        source = PinnedSource(open_source("s3://b/m", StreamConfig(endpoint_url=server.url)), ())
        assert await source.list() == []
        await source.close()

    asyncio.run(run())
    assert not server.counters.requests
