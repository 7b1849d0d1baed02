"""Keeps objects where they are known, and gives them what newer ones of the same make hold.

Processing a layer makes objects that hold tensors, such as kernels with their scales and workspaces. Captured CUDA
graphs know the addresses of those that they were captured with.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import nn

__all__ = ["graft"]


def graft(old: Any, new: Any) -> Any:
    """Return `old` with the values of `new`, as far as both are built alike, and otherwise `new`.

    Tensors keep their memory. Objects of vLLM and containers are walked through; modules are not.
    """
    return _graft(old, new, {})


def _graft(old: Any, new: Any, seen: dict[tuple[int, int], Any]) -> Any:
    if old is new or type(old) is not type(new):
        return new
    key = id(old), id(new)
    if key in seen:
        return seen[key]
    seen[key] = old
    if isinstance(old, torch.Tensor):
        if (old.shape, old.dtype, old.device, old.stride()) != (new.shape, new.dtype, new.device, new.stride()):
            seen[key] = new
        elif old.data_ptr() != new.data_ptr():
            old.data.copy_(new)
    elif isinstance(old, dict):
        # What only the older one has was added since, when the model ran perhaps.
        for name, value in new.items():
            old[name] = _graft(old.get(name), value, seen)
    elif isinstance(old, list):
        old[:] = [_graft(a, b, seen) for a, b in zip(old, new, strict=True)] if len(old) == len(new) else new
    elif isinstance(old, tuple):
        if len(old) != len(new):
            seen[key] = new
        elif type(old) is tuple:
            seen[key] = tuple(_graft(a, b, seen) for a, b in zip(old, new, strict=True))
        else:
            seen[key] = new
    elif _is_made_by_vllm(old):
        _graft(vars(old), vars(new), seen)
    else:
        seen[key] = new
    return seen[key]


def _is_made_by_vllm(value: Any) -> bool:
    kind = type(value)
    return (
        kind.__module__.partition(".")[0] == "vllm"
        and hasattr(value, "__dict__")
        and not isinstance(value, (type, enum.Enum, nn.Module))
    )
