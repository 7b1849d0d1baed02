"""What SGLang makes of parameters after a load, which decides whether it can load into them again.

Quantised layers are repacked for kernels (``process_weights_after_loading``). Few of SGLang's methods undo that before
the next load (``restore_weights_before_loading``). Into the others' parameters nothing can be loaded again if their
shape, dtype or loading code has changed, and SGLang finds out when others are overwritten already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from streamer.trace.pending import storage_key

__all__ = ["Layout", "has_undone_layers", "layouts_of", "left_alone", "storages_of", "stuck_parameters"]

#: Shape, dtype, and whether the layer's own code loads it.
Layout = tuple[tuple[int, ...], torch.dtype, bool]


def layouts_of(model: nn.Module) -> dict[str, Layout]:
    """Return how each parameter is to be loaded, by name."""
    return {
        name: (tuple(parameter.shape), parameter.dtype, getattr(parameter, "weight_loader", None) is not None)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def stuck_parameters(model: nn.Module, before: Mapping[str, Layout], loaded: Collection[str]) -> tuple[str, ...]:
    """Return those of the `loaded` parameters that cannot be loaded again, sorted.

    Args:
        before: their layouts when they were loaded.
    """
    now = layouts_of(model)
    changed = (name for name in sorted(loaded) if name in before and now.get(name) != before[name])
    return tuple(name for name in changed if not _is_undone(_owner_of(model, name)))


def has_undone_layers(model: nn.Module) -> bool:
    """Whether SGLang may change layers before it loads, so that they hold nothing of use until it has."""
    return any(_is_undone(module) for module in model.modules())


def storages_of(model: nn.Module, names: Collection[str]) -> dict[str, int]:
    """Return where the memory of the parameters `names` is, of those that keep theirs from load to load."""
    return {
        name: storage_key(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in names and not _is_undone(_owner_of(model, name))
    }


@contextlib.contextmanager
def left_alone(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let the parameters `names` have in the end the values that they have now, whatever is loaded meanwhile."""
    values = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in names
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if name in values:
                    parameter.copy_(values[name])


def _owner_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _is_undone(module: nn.Module) -> bool:
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase

    method: Any = getattr(module, "quant_method", None)
    base: Any = QuantizeMethodBase
    undo = "restore_weights_before_loading"
    return isinstance(method, base) and getattr(type(method), undo) is not getattr(base, undo)
