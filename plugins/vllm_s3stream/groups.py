"""Which of vLLM's process groups loads a model together."""

from __future__ import annotations

import torch.distributed as dist

from streamer.share.group import Group, ProcessGroup

__all__ = ["group_that_loads"]


def group_that_loads() -> Group | None:
    """Return the tensor-parallel ranks' CPU group, or None for a rank that is alone.

    Not the world: a draft model may be loaded by the last pipeline stage only, and stages load different layers.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    group = parallel_state.get_tp_group().cpu_group
    # Where vLLM's groups are pretended (see `vllm_s3stream.parallel`), there is nobody to talk to.
    return ProcessGroup(group) if isinstance(group, dist.ProcessGroup) else None
