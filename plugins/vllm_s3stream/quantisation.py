"""Online quantisation: layers that are quantised as soon as they are loaded, in the middle of a load.

vLLM buffers a layer's weights until all have been seen, then gives the layer memory, runs its loaders and
quantises it (``vllm/model_executor/model_loader/reload/layerwise.py``). The buffered weights are lazy
tensors, the copies out of them are recorded, and the quantiser may be a kernel that the trace cannot see.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from streamer.trace.lazy import LazyTensor
from vllm_s3stream.versions import require

__all__ = ["complete_before_processing", "finish_delayed_layers", "is_quantised_online"]

#: Completes the copies into some tensors.
Complete = Callable[[Sequence[torch.Tensor]], None]


@contextlib.contextmanager
def complete_before_processing(model: nn.Module, together: Complete, alone: Complete) -> Iterator[None]:
    """Fetch all of a layer's bytes in one go right before vLLM quantises it.

    The quantisation methods of this model, and nobody else's, do so while the context lasts. Every rank processes the
    layers that are split in the same order, for vLLM's own collectives in the middle of it. Experts that are not split
    are complete when a rank has seen its own, which may be before another layer on one rank and after it on the other.
    Were they waited for, ranks would wait for each other in two places, and nobody else wants their bytes.

    Args:
        together: completes on all ranks at once.
        alone: does so on this one.
    """
    wrapped: dict[int, Any] = {}
    for method in _online_methods(model):
        if id(method) not in wrapped:
            wrapped[id(method)] = method
            complete = alone if _has_whole_experts(method) else together
            method.process_weights_after_loading = _completing(method.process_weights_after_loading, complete)
    try:
        yield
    finally:
        for method in wrapped.values():
            del method.process_weights_after_loading  # the class's own shows again


def _completing(process: Any, complete: Complete) -> Any:
    @functools.wraps(process)
    def process_weights_after_loading(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        complete([*layer.parameters(), *layer.buffers()])
        return process(layer, *args, **kwargs)

    return process_weights_after_loading


def _has_whole_experts(method: Any) -> bool:
    return bool(getattr(getattr(method, "moe", None), "use_ep", False))


def is_quantised_online(model: nn.Module) -> bool:
    """Whether vLLM processes layers of `model` in the middle of a load."""
    return any(True for _ in _online_methods(model))


def _online_methods(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "uses_meta_device", False):
            yield method


def finish_delayed_layers(model: nn.Module, model_config: Any) -> None:
    """Have vLLM process layers that still wait, when their buffered weights are ours to fetch.

    Layers with padding never count as complete, and attention layers wait for all others. vLLM processes them
    after ``load_weights``, when the load is over and lazy tensors have no source any more. It does so again
    then, and finds nothing left to do.
    """
    if not is_quantised_online(model):
        return
    from vllm.model_executor.model_loader import reload

    require(reload, "finalize_layerwise_processing", "layerwise")
    require(reload.layerwise, "get_layerwise_info")
    waiting = (
        value
        for module in model.modules()
        for _, bound in reload.layerwise.get_layerwise_info(module).loaded_weights
        for value in (*bound.args, *bound.kwargs.values())
    )
    if any(isinstance(value, LazyTensor) for value in waiting):
        reload.finalize_layerwise_processing(model, model_config)
