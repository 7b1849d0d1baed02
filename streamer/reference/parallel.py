"""Tensor parallelism over ``torch.distributed``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from streamer.errors import ConfigError

__all__ = ["Parallel"]


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's place among `size` ranks.

    Attributes:
        group: who to talk to; None when nothing is computed (planning), or for one rank.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def divide(self, number: int, what: str) -> int:
        """Return each rank's share of `number`.

        Raises:
            ConfigError: it cannot be split evenly.
        """
        if number % self.size:
            raise ConfigError(f"{what} ({number}) cannot be split over {self.size} ranks")
        return number // self.size

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up `tensor` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def concatenate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join every rank's `tensor` along the last dimension, by rank."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
