"""The ranks of a group that are on one machine, and what they have in common: an arena, and pipes to each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamer.errors import StreamError
from streamer.fetch.buffers import Staging
from streamer.plan.sharing import SharedRead
from streamer.share.arena import Arena, SlotPool
from streamer.share.exchange import SharedRound
from streamer.share.links import Links
from streamer.transport.loop import LoopThread

__all__ = ["Node"]


#: Given what for and this rank's value, returns those of all ranks of the group.
Collect = Callable[[str, Any], list[Any]]


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one rank has made for the others, or why it could not.

    Attributes:
        pipes: descriptors, by the place of the rank that they are for.
        arena: descriptor, of the first rank's.
    """

    pid: int
    pipes: Mapping[int, int]
    arena: int | None
    failure: str = ""


class Node:
    """This machine's ranks of a group. Made and used by all of them alike.

    Args:
        ranks: of the group, in order.
        me: this one.

    Attributes:
        place: of this rank among them.
    """

    def __init__(self, ranks: Sequence[int], me: int, loop: LoopThread) -> None:
        self.ranks = tuple(ranks)
        self.place = self.ranks.index(me)
        self._me = me
        self._loop = loop
        self._links = Links()
        self._arena: Arena | None = None
        self._pool: SlotPool | None = None
        self._others = [place for place in range(len(self.ranks)) if place != self.place]

    @property
    def pool(self) -> Staging:
        """This rank's slots."""
        assert self._pool is not None
        return self._pool

    @property
    def arena(self) -> Arena:
        assert self._arena is not None
        return self._arena

    def connect(self, collect: Collect, *, slot_bytes: int, slots: int) -> str:
        """Make arena and pipes, and open the others'; a collective of the whole group.

        Args:
            collect: returns every rank's value.
            slots: of each rank.

        Returns:
            Why it could not be done, on any rank of any machine; empty if all is well.

        Raises:
            StreamError: another rank failed, or is gone.
        """
        part = slot_bytes * slots
        offer, descriptor = self._offer(part * len(self.ranks))
        failure = offer.failure
        try:
            offers = collect("offer shared memory", offer)
            if not failure and not any(offers[rank].failure for rank in self.ranks):
                try:
                    self._accept(offers, part * len(self.ranks))
                except OSError as error:
                    failure = f"rank {self._me} cannot open another rank's shared memory or pipes: {error.strerror}"
            failures = collect("open shared memory", failure)
        finally:
            self._links.keep_own_ends()
            if descriptor is not None:
                os.close(descriptor)
        why = next((text for text in failures if text), "")
        if not why and self._others:
            start = self.place * part
            self._pool = SlotPool(self.arena, start, start + part, slot_bytes)
        return why

    def _offer(self, nbytes: int) -> tuple[_Offer, int | None]:
        descriptor = None
        try:
            if self.place == 0 and self._others:
                self._arena, descriptor = Arena.create(nbytes)
            pipes = self._loop.run(self._links.make(self._others))
            return _Offer(os.getpid(), pipes, descriptor), descriptor
        except (OSError, AttributeError, ValueError) as error:  # Attribute: no memfd but on Linux
            why = f"rank {self._me} can make no shared memory or pipes: {getattr(error, 'strerror', None) or error}"
            return _Offer(os.getpid(), {}, None, why), descriptor

    def _accept(self, offers: Sequence[_Offer], nbytes: int) -> None:
        here = [offers[rank] for rank in self.ranks]
        if self.place:
            self._arena = Arena.open(f"/proc/{here[0].pid}/fd/{here[0].arena}", nbytes)
        paths = {place: f"/proc/{here[place].pid}/fd/{here[place].pipes[self.place]}" for place in self._others}
        self._loop.run(self._links.open(paths))

    def round(self, reads: Sequence[SharedRead]) -> SharedRound:
        """Return this rank's view of one round of `reads`, which count ranks by their place on the machine."""
        names = [f"rank {rank}" for rank in self.ranks]
        return SharedRound(reads, self.place, names, self.arena, self.pool, self._links)

    def give_up(self, error: StreamError) -> None:
        """Tell the others on this machine that this rank failed, at once."""
        self._loop.call_soon(lambda: self._links.give_up(error))

    def close(self) -> None:
        """Close the pipes and let go of the arena. Idempotent."""
        self._loop.run(self._links.close())
        if self._arena is not None:
            self._arena.unpin()
        self._arena = self._pool = None  # the memory goes when nothing refers to it any more
