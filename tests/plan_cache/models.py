"""A model whose loading code is that of engines in small, and says when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import streamer
from streamer.report import LoadReport, PlanCacheUse
from tests.trace.loading import source_of

__all__ = ["KEPT", "STATE", "USED", "Columns", "load"]

Weights = Iterable[tuple[str, torch.Tensor]]

STATE = {
    "column": torch.arange(48.0).reshape(8, 6),
    "norm": torch.arange(6.0) + 100,
    "ignored": torch.arange(4.0),
}
KEPT, USED = PlanCacheUse("kept", ""), PlanCacheUse("used", "")


class Columns(torch.nn.Module):
    """One rank's part of a matrix, padded, and a vector.

    Args:
        then: what `load_weights` does at its end.
    """

    runs = 0
    """How often code of this class ran."""

    def __init__(self, rank: int = 1, rows: int = 5, then: Callable[[Any], object] | None = None) -> None:
        super().__init__()
        self.rank = rank
        self._then = then
        self.column = torch.nn.Parameter(torch.full((rows, 6), -1.0), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.full((6,), -1.0), requires_grad=False)
        self.register_buffer("places", torch.tensor([1, 0]))

    def load_weights(self, weights: Weights) -> Any:
        type(self).runs += 1
        for name, tensor in weights:
            if name == "column":
                self.column.data[:4].copy_(tensor.narrow(0, self.rank * 4, 4))
                self.column.data[4:].fill_(0)
            elif name == "norm":
                self.norm.data.copy_(tensor)
            else:
                tensor.narrow(0, 0, 1)
        return {"column", "norm"} if self._then is None else self._then(self)


def load(folder: Path, model: Any, state: Mapping[str, torch.Tensor] = STATE, **options: Any) -> LoadReport:
    """Load `model` with a plan cache in `folder`."""
    config = {"plan_cache": True, "cache_dir": str(folder), "strict": False, **options}
    return streamer.load(model, source_of(state), config)
