"""What it takes to compute a function later: its shape now, and arguments that cannot change meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from streamer.trace.lazy import LazyTensor, map_lazies

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["infer_on_meta", "meta_of", "snapshot"]

#: Plain tensors up to this size are copied when they take part in a deferred expression.
_SNAPSHOT_BYTES = 1 << 20


def infer_on_meta(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Run `func` on meta tensors; None when it has no meta implementation or refuses its arguments.

    A refusal is not an error here: computed with real values, the call either works or raises as it
    would have without us.
    """
    meta_kwargs = map_lazies(kwargs, meta_of)
    if "device" in kwargs:
        meta_kwargs["device"] = torch.device("meta")
    try:
        result = func(*_to_meta(map_lazies(args, meta_of)), **_to_meta(meta_kwargs))
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
        return None
    if not isinstance(result, torch.Tensor) or not result.is_meta or result.storage_offset():
        return None
    if result.is_conj() or result.is_neg():
        return None  # a view whose values are not those of its bytes
    return result


def meta_of(lazy: LazyTensor) -> torch.Tensor:
    return lazy.lazy_meta


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.to("meta")
    if type(value) in (list, tuple):
        return type(value)(_to_meta(item) for item in value)
    if type(value) is dict:
        return {key: _to_meta(item) for key, item in value.items()}
    return value


def snapshot(value: Any) -> Any:
    """Copy the plain tensors in `value`, whose later changes must not show; None when one is too large."""
    if isinstance(value, LazyTensor):
        return value
    if isinstance(value, torch.Tensor):
        return None if value.numel() * value.element_size() > _SNAPSHOT_BYTES else value.clone()
    if type(value) in (list, tuple):
        items = [snapshot(item) for item in value]
        refused = any(new is None and old is not None for new, old in zip(items, value, strict=True))
        return None if refused else type(value)(items)
    if type(value) is dict:
        items = [snapshot(item) for item in value.values()]
        refused = any(new is None and old is not None for new, old in zip(items, value.values(), strict=True))
        return None if refused else dict(zip(value, items, strict=True))
    return value
