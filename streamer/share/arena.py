"""Memory that all ranks of a machine see, and the slots in which one of them stages its reads.

The memory has no name, so nothing is left behind whatever becomes of whom: it is a ``memfd``, which the others open
through ``/proc`` while its maker waits. It counts against the memory limit of the container once, and, unlike
``/dev/shm``, against no limit of its own.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import warnings

import torch

from streamer.fetch.buffers import Buffer

__all__ = ["Arena", "Slot", "SlotPool"]


class Slot(Buffer):
    """A buffer in an arena, which others find at `offset`."""

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        super().__init__(arena.tensor[offset : offset + nbytes], arena.memory[offset : offset + nbytes])
        self.offset = offset


class Arena:
    """A mapping of shared memory. It lasts as long as something refers to its memory, in any process.

    Attributes:
        tensor: flat uint8.
        memory: the same bytes.

    Raises:
        OSError: from `create` and `open`; the system has no such memory, or does not let us at another's.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._mapping = mmap.mmap(descriptor, nbytes)
        self.memory = memoryview(self._mapping)
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._is_pinned = False

    @classmethod
    def create(cls, nbytes: int) -> tuple[Arena, int]:
        """Return a new arena and its file descriptor, which the caller closes when the others have opened it."""
        descriptor = os.memfd_create("s3stream", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            return cls(descriptor, nbytes), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: str, nbytes: int) -> Arena:
        """Return another process's arena."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def pin_for(self, device: torch.device) -> None:
        """Have CUDA pin the memory, in this process, so that copies to `device` are fast."""
        if self._is_pinned:
            return
        self._is_pinned = True
        with torch.cuda.device(device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = runtime.cudaHostRegister(self.tensor.data_ptr(), len(self.memory), 0)
        if status.value:
            warnings.warn(
                f"shared memory cannot be pinned (CUDA error {status.value}), copies to the GPU will be slower",
                stacklevel=2,
            )
            self._is_pinned = False

    def unpin(self) -> None:
        """Undo `pin_for`; CUDA must not keep memory that goes away."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())  # type: ignore[no-untyped-call]
            self._is_pinned = False

    def slot(self, offset: int, nbytes: int) -> Slot:
        return Slot(self, offset, nbytes)


class SlotPool:
    """Equal slots in one rank's part of an arena. Belongs to one event loop.

    Args:
        start, end: of the part; it must hold a slot.
        slot_bytes: of each.
    """

    def __init__(self, arena: Arena, start: int, end: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._count = (end - start) // slot_bytes
        # The one that was used last comes first: its pages are there already.
        self._free: asyncio.LifoQueue[Buffer] = asyncio.LifoQueue()
        for number in reversed(range(self._count)):
            self._free.put_nowait(arena.slot(start + number * slot_bytes, slot_bytes))
        self._fewest_free = self._count

    def __repr__(self) -> str:
        return f"<SlotPool {self._free.qsize()} of {self._count} slots of {self._slot_bytes} bytes are free>"

    @property
    def peak_bytes(self) -> int:
        """Most memory that was in use at once."""
        return (self._count - self._fewest_free) * self._slot_bytes

    async def acquire(self, nbytes: int) -> Buffer:
        """Return a slot, which must hold `nbytes`, as soon as there is one.

        Raises:
            ValueError: slots are smaller.
        """
        if nbytes > self._slot_bytes:
            raise ValueError(f"a slot has {self._slot_bytes} bytes, not {nbytes}")
        slot = await self._free.get()
        self._fewest_free = min(self._fewest_free, self._free.qsize())
        return slot

    def release(self, buffer: Buffer) -> None:
        """Take back a slot that nobody will read any more."""
        self._free.put_nowait(buffer)
