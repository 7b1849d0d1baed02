"""Every tensor that a model holds, and which of them two models do not have alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

__all__ = ["differences", "tensors_of"]


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor that a module of `model` holds, by name: parameters, buffers and plain attributes.

    Engines keep some in attributes and in lists: quantised scales, convolution states, rotary caches. Left out are the
    constants that torch.fx puts on modules when vLLM traces one of transformers': not on each model, and not loaded.
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        held: dict[str, object] = {**module._parameters, **module._buffers}
        held.update(
            (name, value)
            for name, value in vars(module).items()
            if name not in {"_parameters", "_buffers", "_modules"} and not name.startswith("_tensor_constant")
        )
        found.update(_tensors_in(held, prefix))
    return found


def differences(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names whose tensors are not the same byte for byte, or that only one side has."""
    return [name for name in sorted(a.keys() | b.keys()) if name not in a or name not in b or _differ(a[name], b[name])]


def _tensors_in(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        yield from _tensors_in(item, f"{name}.{key}" if name else str(key))


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return True
    return not a.is_meta and not torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
