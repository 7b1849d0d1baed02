"""One round of loading together, seen from one rank: it hands out what it reads and takes what the others do.

A read lies in its reader's slot until everybody who needs some of it has copied that. What is ready can be
copied by anyone at any time, in any order, and copying waits for nothing, so slots always come free
again, however few there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from streamer.errors import LoadError
from streamer.fetch.buffers import Buffer, Staging
from streamer.fetch.fill import whole_offset
from streamer.fetch.stream import Arrival, Read
from streamer.plan.sharing import SharedRead
from streamer.share.arena import Arena, Slot
from streamer.share.links import Copied, Failed, Gone, Links, Ready

__all__ = ["SharedRound"]


class SharedRound:
    """An `Exchange` (see `streamer.fetch.stream`). Made in any thread, used in the event loop.

    Args:
        reads: of all ranks, the same list everywhere; their numbers are the tags of the stream's reads.
        rank: this one, as the reads count them.
        names: of the ranks, for messages.
    """

    def __init__(
        self, reads: Sequence[SharedRead], rank: int, names: Sequence[str], arena: Arena, pool: Staging, links: Links
    ) -> None:
        self._reads = reads
        self._rank = rank
        self._names = names
        self._arena = arena
        self._pool = pool
        self._links = links
        self._slots: dict[int, Buffer] = {}
        self._holders: dict[int, int] = {}
        shared = [read for read in reads if read.is_shared]
        self._open = sum(1 for read in shared if read.reader == rank or read.has_consumer(rank))
        self._over = asyncio.Event()
        if not self._open:
            self._over.set()

    def publish(self, read: Read, buffer: Buffer | None, deliver: Callable[[Arrival], None]) -> bool:
        shared = self._reads[read.tag]
        if not shared.is_shared:
            return False
        assert isinstance(buffer, Slot)
        consumers = [rank for rank in range(len(self._names)) if shared.has_consumer(rank)]
        self._slots[read.tag], self._holders[read.tag] = buffer, len(consumers)
        for rank in consumers:
            if rank == self._rank:
                deliver(Arrival(read.tag, buffer, partial(self._copied, read.tag)))
            else:
                self._links.send(rank, Ready(read.tag, buffer.offset))
        return True

    def _copied(self, number: int, _: Buffer | None = None) -> None:
        self._holders[number] -= 1
        if not self._holders[number]:
            self._pool.release(self._slots.pop(number))
            self._close_one()

    def _close_one(self) -> None:
        self._open -= 1
        if not self._open:
            self._over.set()

    async def run(self, deliver: Callable[[Arrival], None]) -> None:
        receiving = asyncio.ensure_future(self._receive(deliver))
        ending = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((receiving, ending), return_when=asyncio.FIRST_COMPLETED)
            if not self._over.is_set():
                receiving.result()
        finally:
            receiving.cancel()
            ending.cancel()
            await asyncio.gather(receiving, ending, return_exceptions=True)

    async def _receive(self, deliver: Callable[[Arrival], None]) -> None:
        while True:
            sender, message = await self._links.inbox.get()
            match message:
                case Ready(number, offset):
                    read = self._reads[number]
                    slot = self._arena.slot(offset, whole_offset(read.start) + read.nbytes)
                    deliver(Arrival(number, slot, partial(self._taken, sender, number)))
                case Copied(number):
                    self._copied(number)
                case Failed(error):
                    raise error
                case Gone():
                    raise LoadError(
                        f"{self._names[sender]} ended in the middle of the load",
                        hint="look at its log; the system may have run out of memory",
                    )

    def _taken(self, reader: int, number: int, _: Buffer) -> None:
        self._links.send(reader, Copied(number))
        self._close_one()
