"""Which of vLLM's process groups loads a model together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from streamer.share.group import Group, ProcessGroup

__all__ = ["group_that_loads"]


def group_that_loads() -> Group | None:
    """Return the CPU group of the ranks that load the same layers, or None for a rank that is alone.

    Not the world: a draft model may be loaded by the last pipeline stage only, and stages load different layers. Data
    parallel replicas of a mixture of experts start together and have one group with the tensor-parallel ranks of their
    stage, vLLM's for expert parallelism; those of other models are engines that know nothing of each other.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    group = parallel_state.get_tp_group().cpu_group
    experts: Any = getattr(parallel_state, "_EP", None)  # None for dense models, and its getter asserts that it is not
    # Groups of elastic expert parallelism live outside of torch.distributed; replicas may join them later.
    if parallel_state.get_dp_group().world_size > 1 and type(experts) is parallel_state.GroupCoordinator:
        group = experts.cpu_group
    # Where vLLM's groups are pretended (see `vllm_s3stream.parallel`), there is nobody to talk to.
    return ProcessGroup(group) if isinstance(group, dist.ProcessGroup) else None
