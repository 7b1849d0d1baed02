"""What kind of operation an aten overload is, read from its schema once and remembered."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["Kind", "Kinds", "is_same_values", "kind_of", "written_arguments"]

aten = torch.ops.aten


class Kind(enum.Enum):
    """How the trace treats an operation."""

    COPY = enum.auto()
    """``destination.copy_(source)``: recorded when the source is lazy."""
    VIEW = enum.auto()
    """Returns aliases of its first argument and reads no element."""
    SHAPE_ONLY = enum.auto()
    """Looks at sizes, dtype and device only, such as ``empty_like``."""
    MUTATING = enum.auto()
    """Writes to an argument."""
    PURE = enum.auto()
    """A deterministic function with one new tensor as result; it may be computed later."""
    READING = enum.auto()
    """Everything else: needs values now."""


_SHAPE_ONLY = frozenset(
    {
        "aten::empty_like",
        "aten::zeros_like",
        "aten::ones_like",
        "aten::full_like",
        "aten::rand_like",
        "aten::randn_like",
        "aten::randint_like",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::new_zeros",
        "aten::new_ones",
        "aten::new_full",
        "aten::is_same_size",
        "aten::sym_size",
        "aten::sym_stride",
        "aten::sym_numel",
        "aten::sym_storage_offset",
        "aten::is_contiguous",
        "prim::device",
    }
)
#: Views whose schema does not say so.
_UNDECLARED_VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias"})
_NOT_DEFERRABLE_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


@functools.cache
def kind_of(func: OpOverload) -> Kind:
    """Classify `func`."""
    if func is aten.copy_.default:
        return Kind.COPY
    schema = func._schema
    if schema.is_mutable:
        return Kind.MUTATING
    if schema.name in _SHAPE_ONLY:
        return Kind.SHAPE_ONLY
    if schema.name in _UNDECLARED_VIEWS:
        return Kind.VIEW
    if schema.returns and all(value.alias_info is not None for value in schema.returns):
        return Kind.VIEW
    if any(value.alias_info is not None for value in schema.returns):
        return Kind.READING
    one_tensor = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
    if one_tensor and not any(tag in func.tags for tag in _NOT_DEFERRABLE_TAGS):
        return Kind.PURE
    return Kind.READING


class Kinds(dict[int, tuple[Kind, Callable[..., Any]]]):
    """What `kind_of` said and what to call, by ``id(func)``: to hash or call an overload, Python code runs."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[OpOverload] = []  # or an id could be another's later

    def learn(self, func: OpOverload) -> tuple[Kind, Callable[..., Any]]:
        """Classify `func` and remember it."""
        known = self[id(func)] = kind_of(func), func._op
        self._kept.append(func)
        return known


@functools.cache
def written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that `func` writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def is_same_values(func: OpOverload) -> bool:
    """Whether the result holds its first argument's values, perhaps in another dtype, device or layout."""
    return func in (aten.clone.default, aten._to_copy.default)
