"""Reused staging buffers under one cap, pinned where a GPU will copy from them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

import torch

from streamer.fetch.budget import ByteBudget
from streamer.fetch.memory import bytes_of

__all__ = ["Buffer", "BufferPool", "Staging"]

_SMALLEST = 64 << 10


@dataclass(slots=True)
class Buffer:
    """Staging memory: `tensor` is flat uint8, `memory` the same bytes."""

    tensor: torch.Tensor
    memory: memoryview

    @property
    def nbytes(self) -> int:
        return len(self.memory)


class Staging(Protocol):
    """Where buffers come from. Belongs to one event loop."""

    @property
    def peak_bytes(self) -> int:
        """Most memory that was allocated at once."""

    async def acquire(self, nbytes: int) -> Buffer:
        """Return a buffer of at least `nbytes`, as soon as there is room for it."""

    def release(self, buffer: Buffer) -> None:
        """Take back a buffer that nothing will read any more."""


class BufferPool:
    """Hands out buffers in powers of two; waits when they would exceed `cap_bytes`.

    Nothing is allocated before it is needed, so a small model does not cost the whole cap. Free buffers
    of other sizes are dropped before the cap would be passed.

    Args:
        cap_bytes: of all buffers, free ones included.

    Attributes:
        pin_for: the CUDA device whose context pins new buffers; None leaves them pageable.
    """

    def __init__(self, cap_bytes: int) -> None:
        self._budget = ByteBudget(cap_bytes)
        self.pin_for: torch.device | None = None
        self._free: dict[int, list[Buffer]] = {}
        self._allocated = 0
        self.peak_bytes = 0

    def __repr__(self) -> str:
        return f"<BufferPool {self._allocated} bytes allocated, {self._budget}>"

    @property
    def in_use_bytes(self) -> int:
        return self._budget.used

    async def acquire(self, nbytes: int) -> Buffer:
        """Return a buffer of at least `nbytes`, rounded up to a power of two that the cap must hold."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        await self._budget.acquire(size)
        try:
            return self._take(size)
        except BaseException:
            self._budget.release(size)
            raise

    def _take(self, size: int) -> Buffer:
        free = self._free.get(size)
        if free:
            return free.pop()
        self._make_room(size)
        buffer = self._allocate(size)
        self._allocated += size
        self.peak_bytes = max(self.peak_bytes, self._allocated)
        return buffer

    def _make_room(self, size: int) -> None:
        for free in self._free.values():
            while free and self._allocated + size > self._budget.limit:
                self._allocated -= free.pop().nbytes

    def _allocate(self, size: int) -> Buffer:
        tensor = None
        if self.pin_for is not None:
            try:
                with torch.cuda.device(self.pin_for):
                    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                # A low `ulimit -l` or WSL: slower copies, same result.
                warnings.warn(f"memory cannot be pinned, copies to the GPU will be slower: {error}", stacklevel=2)
                self.pin_for = None
        if tensor is None:
            tensor = torch.empty(size, dtype=torch.uint8)
        return Buffer(tensor, bytes_of(tensor))

    def release(self, buffer: Buffer) -> None:
        """Take back a buffer that nothing will read any more."""
        self._free.setdefault(buffer.nbytes, []).append(buffer)
        self._budget.release(buffer.nbytes)

    def clear(self) -> None:
        """Drop the free buffers."""
        for free in self._free.values():
            self._allocated -= sum(buffer.nbytes for buffer in free)
        self._free.clear()
