"""Engines whose weights cannot be replaced while they serve."""

from __future__ import annotations

from typing import Any

from torch import nn

from streamer.errors import ConfigError
from vllm_s3stream import LOAD_FORMAT
from vllm_s3stream.options import PluginOptions
from vllm_s3stream.update.commit import require_reload
from vllm_s3stream.versions import require

__all__ = ["refuse_asleep", "refuse_engine", "refuse_model", "refuse_replicas", "refuse_transfer"]


def refuse_engine(vllm_config: Any) -> PluginOptions:
    """See that what the engine is configured for survives an update; return our options.

    Everything here is the same on all ranks.

    Raises:
        ConfigError: it does not.
        MissingDependencyError: this vLLM is not built as those that we know.
    """
    load = vllm_config.load_config
    if str(load.load_format).lower() != LOAD_FORMAT:
        raise _no(f"its load format is {load.load_format}", f"start the engine with --load-format {LOAD_FORMAT}")
    options = PluginOptions.parse(load.model_loader_extra_config or {})
    if options.sharded:
        raise _no("it was loaded from sharded state", "load from a checkpoint that is not split by ranks")
    if vllm_config.model_config.quantization == "torchao":
        raise _no("torchao's tensors are rebuilt while they are loaded", "start another engine")
    parallel = vllm_config.parallel_config
    if getattr(parallel, "enable_eplb", False):
        raise _no("its experts move between ranks", "start the engine without --enable-eplb")
    offload = getattr(vllm_config, "offload_config", None)
    if offload is not None and (offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size):
        raise _no("some of its weights are offloaded to the host", "start the engine without offloading")
    _refuse_compiled_packing(vllm_config)
    require_reload()
    return options


def _refuse_compiled_packing(vllm_config: Any) -> None:
    """On CPU, layers call packed weights by functions of their own, which compiled code has made constants of."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and int(vllm_config.compilation_config.mode or 0):
        raise _no("vLLM compiles packed weights into its code on CPU", "start the engine with --enforce-eager")


def refuse_model(model: nn.Module, *, parts: int) -> None:
    """See that the model's own code allows an update.

    Raises:
        ConfigError: it does not.
    """
    if parts != 1:
        raise _no(f"it is made of {parts} checkpoints", "start another engine")
    if hasattr(model, "process_weights_after_loading"):
        raise _no(f"{type(model).__name__} processes its weights as a whole after loading", "start another engine")


def refuse_replicas() -> None:
    """See that no other engine takes part in this one's steps.

    Raises:
        ConfigError: data parallel replicas of a mixture of experts do, and would wait for ever.
    """
    from vllm.distributed import parallel_state

    if parallel_state.get_dp_group().world_size > 1:
        raise _no("its data parallel replicas step together", "start another deployment, and move the traffic")


def refuse_asleep() -> None:
    """See that the model's memory is there: ``LLM.sleep`` gives it back to the device.

    Raises:
        ConfigError: it is not.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return
    from vllm.device_allocator.cumem import CuMemAllocator

    require(CuMemAllocator, "instance")
    allocator = CuMemAllocator.instance
    if allocator is not None and any(allocation.is_asleep for allocation in allocator.pointer_to_data.values()):
        raise _no("it sleeps", "wake it up first")


def refuse_transfer(worker: Any) -> None:
    """See that vLLM's own protocol for new weights (``start_weight_update``) is not in the middle of some.

    Raises:
        ConfigError: it is.
    """
    if getattr(worker, "_weight_update_active", False):
        raise _no("another update has begun", "finish that one first")


def _no(why: str, hint: str) -> ConfigError:
    return ConfigError(f"this engine's weights cannot be updated while it serves: {why}", hint=hint)
