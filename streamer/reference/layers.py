"""Tensor-parallel layers, after Megatron-LM (https://arxiv.org/abs/1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from streamer.errors import ConfigError, LoadError
from streamer.reference.module import LoadableModule, copy_exact
from streamer.reference.parallel import Parallel

__all__ = [
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
]


def _parameter(*shape: int) -> nn.Parameter:
    # On whichever device the builder has made the default; it says the dtype afterwards.
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class RMSNorm(LoadableModule):
    """Root-mean-square normalisation, computed in float32; replicated on every rank."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self._epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return self.weight * wide.to(hidden.dtype)


class ColumnParallelLinear(LoadableModule):
    """``x @ W.T + b`` with the rows of W (the columns of W.T) split over ranks; its output is split."""

    def __init__(self, inputs: int, outputs: int, parallel: Parallel, *, bias: bool) -> None:
        super().__init__()
        self._parallel = parallel
        self._rows = parallel.divide(outputs, "output features")
        self.weight = _parameter(self._rows, inputs)
        self.bias = _parameter(self._rows) if bias else None

    def load_parameter(self, parameter: str, tensor: torch.Tensor, shard: str | None) -> None:
        mine = tensor.narrow(0, self._parallel.rank * self._rows, self._rows)
        copy_exact(self.get_parameter(parameter), mine, parameter)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.weight, self.bias)


class MergedColumnParallelLinear(LoadableModule):
    """Several column-parallel layers of equal input in one weight, such as gate and up projections.

    Args:
        outputs: source module name to its unsplit number of rows, in order.
    """

    def __init__(self, inputs: int, outputs: Mapping[str, int], parallel: Parallel, *, bias: bool) -> None:
        super().__init__()
        self.shard_names = tuple(outputs)
        self._parallel = parallel
        self._rows = {name: parallel.divide(rows, f"rows of {name}") for name, rows in outputs.items()}
        total = sum(self._rows.values())
        self.weight = _parameter(total, inputs)
        self.bias = _parameter(total) if bias else None

    def _source_start(self, shard: str) -> int:
        """First row, in the checkpoint's tensor, that this rank takes."""
        return self._parallel.rank * self._rows[shard]

    def load_parameter(self, parameter: str, tensor: torch.Tensor, shard: str | None) -> None:
        if shard is None:
            raise LoadError(f"{type(self).__name__} takes only {', '.join(self.shard_names)}")
        start = 0
        for name in self.shard_names[: self.shard_names.index(shard)]:
            start += self._rows[name]
        rows = self._rows[shard]
        destination = self.get_parameter(parameter).narrow(0, start, rows)
        copy_exact(destination, tensor.narrow(0, self._source_start(shard), rows), f"{shard}.{parameter}")

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        merged = functional.linear(hidden, self.weight, self.bias)
        return torch.split(merged, list(self._rows.values()), dim=-1)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections, split by heads; key-value heads are replicated when ranks outnumber them."""

    def __init__(
        self, inputs: int, head_size: int, heads: int, kv_heads: int, parallel: Parallel, *, bias: bool
    ) -> None:
        if parallel.size > kv_heads and parallel.size % kv_heads:
            raise ConfigError(f"{kv_heads} key-value heads cannot be spread over {parallel.size} ranks")
        replicas = max(1, parallel.size // kv_heads)
        kv_rows = kv_heads * replicas * head_size
        rows = {"q_proj": heads * head_size, "k_proj": kv_rows, "v_proj": kv_rows}
        super().__init__(inputs, rows, parallel, bias=bias)
        self._replicas = replicas
        self.heads = parallel.divide(heads, "attention heads")
        self.kv_heads = parallel.divide(kv_heads * replicas, "key-value heads")

    def _source_start(self, shard: str) -> int:
        replicas = 1 if shard == "q_proj" else self._replicas
        return self._parallel.rank // replicas * self._rows[shard]


class RowParallelLinear(LoadableModule):
    """``x @ W.T + b`` with the columns of W split over ranks; its input is split, its output is whole."""

    def __init__(self, inputs: int, outputs: int, parallel: Parallel, *, bias: bool) -> None:
        super().__init__()
        self._parallel = parallel
        self._columns = parallel.divide(inputs, "input features")
        self.weight = _parameter(outputs, self._columns)
        self.bias = _parameter(outputs) if bias else None

    def load_parameter(self, parameter: str, tensor: torch.Tensor, shard: str | None) -> None:
        if parameter == "weight":
            tensor = tensor.narrow(1, self._parallel.rank * self._columns, self._columns)
        copy_exact(self.get_parameter(parameter), tensor, parameter)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        total = self._parallel.sum(functional.linear(hidden, self.weight))
        return total if self.bias is None else total + self.bias


class _VocabParallel(LoadableModule):
    """Rows of a vocabulary split over ranks, padded to a multiple of the ranks."""

    def __init__(self, vocabulary: int, features: int, parallel: Parallel) -> None:
        super().__init__()
        self._parallel = parallel
        self._vocabulary = vocabulary
        self._rows = -(-vocabulary // parallel.size)
        self._start = parallel.rank * self._rows
        self.weight = _parameter(self._rows, features)

    def load_parameter(self, parameter: str, tensor: torch.Tensor, shard: str | None) -> None:
        if tensor.shape[0] != self._vocabulary:
            raise LoadError(f"the vocabulary has {self._vocabulary} entries, the checkpoint {tensor.shape[0]}")
        count = max(0, min(self._rows, self._vocabulary - self._start))
        if count:
            copy_exact(self.weight[:count], tensor.narrow(0, self._start, count), parameter)
        self.weight[count:].zero_()


class VocabParallelEmbedding(_VocabParallel):
    """Token ids to features: each rank looks up its own rows, the sum is everyone's."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local = tokens - self._start
        mine = (local >= 0) & (local < self._rows)
        features = functional.embedding(local.masked_fill(~mine, 0), self.weight)
        return self._parallel.sum(features.masked_fill(~mine.unsqueeze(-1), 0))


class VocabParallelHead(_VocabParallel):
    """Features to logits over the whole vocabulary."""

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Share the embedding's weight."""
        self.weight = embedding.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._parallel.concatenate(functional.linear(hidden, self.weight))
        return logits[..., : self._vocabulary]
