"""Stands in for vLLM's process groups, so that one process builds and loads any rank's share of a model.

vLLM's layers never look at the network while they are built or loaded: they ask the module attributes of
``vllm/distributed/parallel_state.py`` for sizes and ranks. Putting objects with the right numbers there is enough,
takes no time, and leaves ``torch.distributed`` alone, which allows one default group per process only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

__all__ = ["pretend", "set_layout"]


@contextmanager
def pretend(*, tensor: int, pipeline: int = 1, rank: int) -> Iterator[None]:
    """Make vLLM believe that this process is `rank` of ``tensor * pipeline``; undone on exit.

    Data and context parallelism are of size 1. Whether experts are split whole is not told by the groups but by
    the configuration (see `set_layout`): vLLM gives the expert group all tensor-parallel ranks in either case
    (``initialize_model_parallel``). The attributes are the process's, so only one thread may pretend at a time.

    Raises:
        ValueError: there is no such rank.
    """
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import utils

    if tensor < 1 or pipeline < 1 or not 0 <= rank < tensor * pipeline:
        raise ValueError(f"no rank {rank} among {tensor} x {pipeline}")
    wanted = _groups(tensor, pipeline, rank)
    # Later versions add groups; an attribute that this version lacks would be read by nobody.
    before = {name: getattr(parallel_state, name) for name in wanted if hasattr(parallel_state, name)}
    # Which layers belong to other stages is remembered by the model's id(). A model of another rank, built where a
    # deleted one lay, would be taken for it.
    missing_layers: dict[int, list[str]] = getattr(utils, "_model_to_pp_missing_layer_names", {})
    missing_layers.clear()
    for name in before:
        setattr(parallel_state, name, wanted[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)
        missing_layers.clear()


def set_layout(vllm_config: Any, *, tensor: int, pipeline: int = 1, rank: int, experts: bool = False) -> None:
    """Write into a configuration made for one rank what `pretend` tells by groups.

    Asking ``EngineArgs`` for these sizes would look for as many devices (``vllm/config/parallel.py``).

    Raises:
        ValueError: the model cannot be split like this.
        NotImplementedError: the model has no pipeline parallelism.
    """
    parallel = vllm_config.parallel_config
    parallel.tensor_parallel_size = tensor
    parallel.pipeline_parallel_size = pipeline
    parallel.world_size = tensor * pipeline  # derived on construction only
    parallel.rank = rank  # ModelConfig takes a stage's layers from it
    parallel.enable_expert_parallel = experts
    vllm_config.model_config.verify_with_parallel_config(parallel)


def _groups(tensor: int, pipeline: int, rank: int) -> Mapping[str, Any]:
    """Return this rank's groups by attribute; vLLM counts ranks in the order PP x TP."""
    stage, tensor_rank = divmod(rank, tensor)
    alone = _Group((rank,), rank)
    across = _Group(tuple(range(stage * tensor, (stage + 1) * tensor)), rank)
    along = _Group(tuple(range(tensor_rank, tensor * pipeline, tensor)), rank)
    everyone = _Group(tuple(range(tensor * pipeline)), rank)
    return {
        "_WORLD": everyone,
        "_INNER_DP_WORLD": everyone,
        "_NODE_COUNT": 1,
        "_TP": across,
        "_ETP": across,  # embedding tables are split like the rest, unless configured otherwise
        "_EP": across,
        "_PP": along,
        "_DP": alone,
        "_DCP": alone,
        "_PCP": alone,
        # None is what vLLM leaves in these without expert balancing and data parallelism.
        "_EPLB": None,
        "_ENGRAM_DP": None,
    }


@dataclass(frozen=True, slots=True)
class _ProcessGroup:
    """As much of ``torch.distributed.ProcessGroup`` as models use: sizes, and the maximum of absolute weights.

    ``torch.distributed.all_reduce`` calls `allreduce` of whatever it is given, if that is no None. Online
    quantisation does so while it loads (``quantization/utils/quant_utils.py``); the other ranks' values are not to
    be had, and which bytes a rank needs does not depend on them.
    """

    ranks: tuple[int, ...]
    position: int

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.position

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> None:
        """Leave the tensors as they are."""


@dataclass(frozen=True, slots=True)
class _Group:
    """As much of vLLM's ``GroupCoordinator`` as models use while they are built and loaded.

    Attributes:
        ranks: global ranks of the members.
        rank: this process's global rank.
    """

    ranks: tuple[int, ...]
    rank: int

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def rank_in_group(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def local_rank(self) -> int:
        return self.rank

    @property
    def first_rank(self) -> int:
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank == self.first_rank

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.last_rank

    @property
    def device(self) -> torch.device:
        return torch.get_default_device()

    @property
    def device_communicator(self) -> None:
        return None

    @property
    def device_group(self) -> _ProcessGroup:
        return _ProcessGroup(self.ranks, self.rank_in_group)

    @property
    def cpu_group(self) -> _ProcessGroup:
        return self.device_group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, for the reasons of `_ProcessGroup`."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._exchange("all_gather", tensor)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._exchange("reduce_scatter", tensor)

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor:
        return self._exchange("gather", tensor)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return self._exchange("broadcast", tensor)

    def _exchange(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.ranks) > 1:
            self._refuse(what)
        return tensor

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"{what} among ranks {self.ranks}, but they are pretended: there is no other process")
