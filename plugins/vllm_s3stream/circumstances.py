"""What vLLM's loading code may go by, beside the model and the checkpoint."""

from __future__ import annotations

import json

from streamer.plan_cache.cache import Circumstances

__all__ = ["circumstances_of_vllm"]

#: Process groups of ``vllm.distributed.parallel_state``; which there are depends on the version and the layout.
_GROUPS = ("_WORLD", "_TP", "_ETP", "_PP", "_DP", "_EP", "_EPLB", "_DCP", "_PCP")


def circumstances_of_vllm() -> Circumstances | None:
    """Return them for the engine that is being started in this process, or None if there is none.

    vLLM's own digests of its configuration and environment are those that its compilation cache goes by.
    """
    import vllm
    from vllm import envs
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import parallel_state

    config = get_current_vllm_config_or_none()
    if config is None:
        return None
    groups = {name: getattr(parallel_state, name, None) for name in _GROUPS}
    facts = {
        "engine": "vllm",
        "version": str(vllm.__version__),
        "config": str(config.compute_hash()),
        "environment": json.dumps(envs.compile_factors(), sort_keys=True, default=str),
        **{name: f"{group.rank_in_group} of {group.world_size}" for name, group in groups.items() if group is not None},
    }
    return Circumstances(facts, _is_opaque)


def _is_opaque(kind: type) -> bool:
    """Whether objects of a class hold settings that ``config`` digests, or addresses that change with every start."""
    return kind.__module__.startswith(("vllm.config.", "vllm.distributed.", "torch."))
