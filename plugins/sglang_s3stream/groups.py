"""Which of SGLang's process groups loads a model together."""

from __future__ import annotations

import torch.distributed as dist

from streamer.share.group import Group, ProcessGroup

__all__ = ["group_that_loads"]


def group_that_loads() -> Group | None:
    """Return the tensor-parallel ranks' CPU group, or None for a rank that is alone.

    Not the world: pipeline stages load different layers, and a draft model may be loaded by the last only. SGLang's
    own barrier after loading is over this group too (``load_model_utils.dist_barrier_after_load``).
    """
    from sglang.srt.runtime_context import get_parallel

    group = getattr(get_parallel().tp_group, "cpu_group", None)
    # Where SGLang's groups are pretended (see `sglang_s3stream.parallel`), there is nobody to talk to.
    return ProcessGroup(group) if isinstance(group, dist.ProcessGroup) else None
