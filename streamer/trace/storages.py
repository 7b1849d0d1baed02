"""Which storages belong to a model: only copies into those may be deferred."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from streamer.trace.lazy import LazyTensor
from streamer.trace.pending import storage_key, storage_of

__all__ = ["ModelStorages", "named_tensors"]


def named_tensors(model: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by every name they have, tied ones included."""
    if isinstance(model, torch.nn.Module):
        yield from model.named_parameters(remove_duplicate=False)
        yield from model.named_buffers(remove_duplicate=False)


class ModelStorages:
    """The storages of a model's parameters and buffers, followed as loading replaces them.

    Layer-wise quantisation, among others, gives parameters new storage in the middle of a load
    (``vllm/model_executor/model_loader/reload``), so a miss may mean that the model must be walked again.
    Walking is amortised: fruitless walks become rarer. A storage that is missed for a while is not an
    error, its copies are just made at once.

    Attributes:
        known: keys that need no walk to be found here.
    """

    def __init__(self, model: object) -> None:
        self._model = model
        # The storages themselves are kept, or a freed one's address could come back as another tensor's.
        self.known: dict[int, torch.UntypedStorage] = {}
        self._misses = 0
        self._walk_after = 1
        self._collect()

    def _collect(self) -> None:
        self.known = {
            storage_key(tensor): storage_of(tensor)
            for _, tensor in named_tensors(self._model)
            if not isinstance(tensor, LazyTensor)
        }

    def __contains__(self, key: int) -> bool:
        if key in self.known:
            return True
        self._misses += 1
        if self._misses >= self._walk_after:
            self._misses = 0
            self._collect()
            self._walk_after = 1 if key in self.known else min(2 * self._walk_after, 1024)
        return key in self.known
