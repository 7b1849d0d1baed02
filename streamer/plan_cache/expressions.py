"""Functions of checkpoint tensors, as data: what a model's code computes out of them before it is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from streamer.trace.lazy import LazyTensor

__all__ = ["Expression", "Geometry", "Source", "arguments_of", "function_of", "name_of", "plain"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """How elements lie in a storage, a tensor of a file or a computed tensor; strides and offset in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """One past the last byte that an element touches, from the beginning of the storage."""
        if 0 in self.shape:
            return self.offset * self.dtype.itemsize
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize


class Source(NamedTuple):
    """Elements of a tensor of the checkpoint, by its name, or of an expression, by its number."""

    of: str | int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Expression:
    """``function(*args, **kwargs)``.

    Attributes:
        function: such as ``aten::cat.default``.
        arguments: the pair of them, as `plain` makes it, which numbers the `sources`.
        sources: what stands in the place of tensors.
    """

    function: str
    arguments: Any
    sources: tuple[Source, ...]


def name_of(function: torch._ops.OpOverload) -> str:
    """Return the name that `function_of` finds it by."""
    return f"{function._schema.name}.{function._overloadname}"


def function_of(name: str) -> torch._ops.OpOverload:
    """Return a function by its name.

    Raises:
        AttributeError, ValueError: torch has none like this.
    """
    space, _, rest = name.partition("::")
    packet, overload = rest.rsplit(".", 1)
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, space), packet), overload)
    return found


#: What arguments may be beside tensors, numbers, strings and lists, and how it is read again.
_TORCHS: dict[str, tuple[type, Callable[[str], Any]]] = {
    "dtype": (torch.dtype, lambda text: getattr(torch, text)),
    "memory_format": (torch.memory_format, lambda text: getattr(torch, text)),
    "layout": (torch.layout, lambda text: getattr(torch, text)),
    "device": (torch.device, torch.device),
}


def plain(value: Any, number: Callable[[LazyTensor], int]) -> Any:
    """Return arguments as JSON knows them.

    Args:
        number: tells how a lazy tensor among them is called.

    Raises:
        ValueError: there is something that cannot be said, such as a tensor with values.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, LazyTensor):
        return {"source": number(value)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [plain(item, number) for item in value]}
    if type(value) is dict:
        return {"dict": [[key, plain(item, number)] for key, item in value.items()]}
    for name, (kind, _) in _TORCHS.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise ValueError(f"an argument of type {type(value).__name__}")


def arguments_of(value: Any, lazies: Sequence[LazyTensor]) -> Any:
    """Return what `plain` was given.

    Args:
        lazies: by the numbers that it gave them.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: `plain` did not make this.
    """
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "source":
        return lazies[inner]
    if kind in ("list", "tuple"):
        items = [arguments_of(item, lazies) for item in inner]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: arguments_of(item, lazies) for key, item in inner}
    return _TORCHS[kind][1](inner)
