"""Finds lazy tensors that a model kept, which would have no values when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from streamer.errors import LeakedLazyTensorError, shorten
from streamer.trace.lazy import LazyTensor

__all__ = ["refuse_leaks"]

_DEPTH = 3  # of containers inside a module's attributes


def refuse_leaks(model: object) -> None:
    """Raise if a parameter, buffer or attribute of `model` is still lazy, or holds one that is.

    Raises:
        LeakedLazyTensorError: naming where.
    """
    if not isinstance(model, torch.nn.Module):
        return
    found = sorted(
        f"{name}.{attribute}".lstrip(".") for name, module in model.named_modules() for attribute in _leaks(module)
    )
    if found:
        raise LeakedLazyTensorError(
            f"the model keeps tensors of the checkpoint that were never fetched: {shorten(found)}",
            hint="load with mode=eager",
        )


def _leaks(module: torch.nn.Module) -> Iterator[str]:
    for attribute, value in vars(module).items():
        if attribute == "_modules":
            continue
        if attribute in ("_parameters", "_buffers"):
            for name, tensor in value.items():
                if _holds_lazy(tensor, 1) or (tensor is not None and _holds_lazy(vars(tensor), 1)):
                    yield name
        elif _holds_lazy(value, _DEPTH):
            yield attribute


def _holds_lazy(value: Any, depth: int) -> bool:
    if isinstance(value, LazyTensor):
        return True
    if not depth or not isinstance(value, (list, tuple, dict, set)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_holds_lazy(item, depth - 1) for item in items)
