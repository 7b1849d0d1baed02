"""Who is told of all that a traced load does to its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from streamer.trace.lazy import LazyTensor

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["Watcher"]


class Watcher(Protocol):
    """Told in the order in which the model's code does things, and before they are done."""

    def copied(self, destination: torch.Tensor, source: LazyTensor, key: int) -> None:
        """`source` is copied into the model's storage `key`."""

    def saw(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """An operation reads or writes values, of whatever tensors."""

    def taken(self, tensor: torch.Tensor, how: str) -> None:
        """The memory of `tensor` is asked for past the dispatcher, by method `how`."""
