"""Pipes between the ranks of a machine: short messages, and word of each other's end.

From each rank to each other goes one pipe, made by the sender, who alone holds its writing end. So it ends when the
sender does, however that happens, and the receiver knows at once. Pipes have no names and leave nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamer.errors import StreamError

__all__ = ["Copied", "Failed", "Gone", "Inbox", "Links", "Message", "Ready"]


@dataclass(frozen=True, slots=True)
class Ready:
    """The bytes of read `number` lie in the arena, from `offset` on."""

    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class Copied:
    """The sender needs nothing more of the bytes of read `number`."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The sender gives up."""

    error: StreamError


@dataclass(frozen=True, slots=True)
class Gone:
    """The sender's process has ended, or has closed its links."""


Message = Ready | Copied | Failed | Gone
#: Whatever arrives, with the rank that it came from.
Inbox = asyncio.Queue[tuple[int, Message]]

_HEAD = struct.Struct("<BQQ")  # kind, two numbers; after a failure, the second is the length of what follows
_READY, _COPIED, _FAILED = range(3)


class _Receiver(asyncio.Protocol):
    def __init__(self, sender: int, inbox: Inbox) -> None:
        self._sender = sender
        self._inbox = inbox
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        position = 0
        while len(self._received) - position >= _HEAD.size:
            kind, first, second = _HEAD.unpack_from(self._received, position)
            end = position + _HEAD.size + (second if kind == _FAILED else 0)
            if end > len(self._received):
                break
            if kind == _READY:
                self._put(Ready(first, second))
            elif kind == _COPIED:
                self._put(Copied(first))
            else:
                # From a process of our own making, which could as well write into our memory.
                self._put(Failed(pickle.loads(self._received[position + _HEAD.size : end])))
            position = end
        del self._received[:position]

    def connection_lost(self, exc: Exception | None) -> None:
        self._put(Gone())

    def _put(self, message: Message) -> None:
        self._inbox.put_nowait((self._sender, message))


class Links:
    """This rank's ends of the pipes to and from the others. Belongs to one event loop.

    Attributes:
        inbox: what the others sent, in each one's order.
    """

    def __init__(self) -> None:
        self.inbox: Inbox = asyncio.Queue()
        self._outgoing: dict[int, asyncio.WriteTransport] = {}
        self._incoming: list[asyncio.BaseTransport] = []
        self._reading_ends: list[int] = []

    async def make(self, others: list[int]) -> Mapping[int, int]:
        """Make a pipe to each of `others`; return the descriptors of the ends that they open, by rank.

        Raises:
            OSError: too many open files.
        """
        loop = asyncio.get_running_loop()
        ends = {}
        for rank in others:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            self._reading_ends.append(reading)
            file = os.fdopen(writing, "wb", buffering=0)
            transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, file)
            self._outgoing[rank] = transport
            ends[rank] = reading
        return ends

    async def open(self, paths: Mapping[int, str]) -> None:
        """Open the pipes that the others made for us.

        Raises:
            OSError: the system does not let us.
        """
        loop = asyncio.get_running_loop()
        for rank, path in paths.items():
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
            transport, _ = await loop.connect_read_pipe(lambda rank=rank: _Receiver(rank, self.inbox), file)  # type: ignore[misc]
            self._incoming.append(transport)

    def keep_own_ends(self) -> None:
        """Close the reading ends, once the others have opened them."""
        for descriptor in self._reading_ends:
            os.close(descriptor)
        self._reading_ends.clear()

    def send(self, rank: int, message: Ready | Copied) -> None:
        """Send `message`, soon; nothing happens if the other is gone."""
        if isinstance(message, Ready):
            self._write(rank, _HEAD.pack(_READY, message.number, message.offset))
        else:
            self._write(rank, _HEAD.pack(_COPIED, message.number, 0))

    def give_up(self, error: StreamError) -> None:
        """Tell everybody that this rank failed, and why."""
        body: Any = pickle.dumps(error)
        for rank in self._outgoing:
            self._write(rank, _HEAD.pack(_FAILED, 0, len(body)) + body)

    def _write(self, rank: int, data: bytes) -> None:
        transport = self._outgoing[rank]
        if not transport.is_closing():
            transport.write(data)

    async def close(self) -> None:
        """Close every end, after what was sent has been written. Idempotent."""
        self.keep_own_ends()
        for transport in (*self._outgoing.values(), *self._incoming):
            transport.close()
        self._outgoing.clear()
        self._incoming.clear()
        await asyncio.sleep(0)  # transports close their files in callbacks of their own
