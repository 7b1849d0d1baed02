"""Stands in for SGLang's process groups, so that one process builds and loads any rank's share of a model.

SGLang's layers ask its runtime context for sizes and ranks (``runtime_context.get_parallel``) and look at no network
while they are built or loaded. The context is published for one rank, as a scheduler's launcher does, and told of
groups with the right numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["pretend"]


@dataclass(frozen=True, slots=True)
class _Group:
    """As much of SGLang's ``GroupCoordinator`` as models use while they are built and loaded."""

    rank_in_group: int
    world_size: int
    cpu_group: None = None
    device_group: None = None

    @property
    def rank(self) -> int:
        return self.rank_in_group

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def next_rank(self) -> int:
        return (self.rank_in_group + 1) % self.world_size

    @property
    def prev_rank(self) -> int:
        return (self.rank_in_group - 1) % self.world_size


@contextmanager
def pretend(server_args: Any, *, rank: int) -> Iterator[None]:
    """Make SGLang believe that this process is `rank` of those that `server_args` ask for; undone on exit.

    Ranks are counted in the order PP x TP. The context is the process's, so only one thread may pretend at a time.

    Args:
        server_args: a ``ServerArgs``, resolved here if it is not.

    Raises:
        ValueError: SGLang does not take these arguments.
    """
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context

    reset_context()
    try:
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
        parallel = get_parallel()
        parallel.override_permanently(
            pp_group=_Group(parallel.pp_rank, parallel.pp_size),
            tp_group=_Group(parallel.tp_rank, parallel.tp_size),
            attn_tp_group=_Group(parallel.attn_tp_rank, parallel.attn_tp_size),
            moe_tp_group=_Group(parallel.moe_tp_rank, parallel.moe_tp_size),
            moe_ep_group=_Group(parallel.moe_ep_rank, parallel.moe_ep_size),
            attn_cp_group=_Group(0, 1),
        )
        yield
    finally:
        reset_context()
