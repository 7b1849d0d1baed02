"""Takes down what a model's loading code does to the model, and notices what a recipe cannot say."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from streamer.plan_cache.description import Description, Place
from streamer.plan_cache.expressions import Expression, Geometry, Source, name_of, plain
from streamer.plan_cache.recipe import Attribute, CopyStep, FillStep, Recipe, Returned, Step
from streamer.trace.lazy import Base, DeferredBase, FileBase, LazyTensor, describe_base
from streamer.trace.ops import written_arguments
from streamer.trace.pending import storage_key
from streamer.trace.storages import named_tensors
from streamer.trace.tracer import Weights

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from streamer.trace.layout import Layout

__all__ = ["Recorder", "Unrepeatable"]

_FILLS = frozenset({"aten::zero_", "aten::fill_"})


class Unrepeatable(Exception):
    """The load did something that a recipe cannot say."""


@dataclass(slots=True)  # frozen ones take three times as long to make, and there is one for each copy
class _Copied:
    position: int
    key: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    base: Base
    layout: Layout


@dataclass(frozen=True, slots=True)
class _Filled:
    position: int
    key: int
    geometry: Geometry
    value: bool | int | float


class Recorder:
    """Watches a load that is traced: a `streamer.trace.copies.Watcher`.

    Loading code may look at names, shapes, attributes and tables: all of that is part of what a recipe is kept
    under. It may not look at other values, neither of the checkpoint nor of the model, since what it does then may
    depend on them, and may not write other values into the model than the checkpoint's and constants.

    Args:
        before: what the model was when loading began.
    """

    def __init__(self, before: Description) -> None:
        self._refusal = ""
        self._before = before
        self._storages = {key for _, key, _ in before.tensors.values()}
        self._read: dict[int, str] = {}
        self._log: list[_Copied | _Filled] = []
        self._asked = 0

    def watch(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand out `weights`, and count them."""
        for pair in weights:
            self._asked += 1
            yield pair
        self._asked += 1

    # -- what the trace tells ----------------------------------------------------------------------------

    def copied(self, destination: torch.Tensor, source: LazyTensor, key: int) -> None:
        """Note a copy into storage `key` of the model."""
        self._log.append(
            _Copied(
                self._asked,
                key,
                destination.dtype,
                destination.size(),
                destination.stride(),
                int(destination.storage_offset()),
                source.lazy_base,
                source.lazy_layout,
            )
        )

    def saw(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note an operation that is neither a view nor a copy out of a lazy tensor."""
        touched = [tensor for tensor in _plain_tensors((args, kwargs)) if self._is_models(tensor)]
        if not touched:
            return
        name = func._schema.name
        if name in _FILLS and len(touched) == 1 and touched[0] is args[0]:
            value = args[1] if len(args) > 1 else kwargs.get("value", 0)
            if isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor) and not value.is_meta:
                value = value.item()
            if type(value) in (bool, int, float):
                self._log.append(_Filled(self._asked, storage_key(args[0]), _geometry_of(args[0]), value))
                return
        if written_arguments(func):
            self._refuse(f"its code writes to the model by {name}")
        for tensor in touched:
            self._read.setdefault(storage_key(tensor), name)

    def taken(self, tensor: torch.Tensor, how: str) -> None:
        """Note that the memory of `tensor` was asked for past torch's operations."""
        if self._is_models(tensor):
            self._refuse(f"its code takes the memory of the model's tensors by {how}")

    def _is_models(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._storages

    def _refuse(self, why: str) -> None:
        self._refusal = self._refusal or why

    # -- what comes of it ----------------------------------------------------------------------------------

    def recipe(
        self, model: torch.nn.Module, after: Description, returned: object, bases: Mapping[str, FileBase]
    ) -> Recipe:
        """Return what was done to `model`.

        Args:
            after: what the model is now.
            returned: by ``load_weights``.
            bases: of the tensors that were handed out.

        Raises:
            Unrepeatable: some of it cannot be said.
        """
        if self._refusal:
            raise Unrepeatable(self._refusal)
        written = {entry.key for entry in self._log}
        for key, how in self._read.items():
            if key in written or key not in self._before.valued:
                raise Unrepeatable(f"its code looks at values of the model by {how}")
        if where := self._before.exchanged(after):
            raise Unrepeatable(f"its code changes a tensor otherwise: {where}")
        if not _is_repeatable(returned):
            raise Unrepeatable(f"its load_weights returned something else than names: {type(returned).__name__}")
        names: dict[int, str] = {}
        for name, tensor in named_tensors(model):
            names.setdefault(storage_key(tensor), name)
        if not written <= names.keys():
            raise Unrepeatable("its code writes to tensors that are no parameters or buffers when it ends")
        sources = _Sources()
        return Recipe(
            steps=tuple(_step(entry, names[entry.key], sources) for entry in self._log),
            asked=self._asked,
            returned=returned,
            attributes=tuple(_attribute(place, self._before, after) for place in self._before.changes(after)),
            looked_at=tuple(name for name, base in bases.items() if base.looked_at and not base.used),
            expressions=tuple(sources.expressions),
        )


def _attribute(place: Place, before: Description, after: Description) -> Attribute:
    if place in after.attributes:
        value = after.attributes[place]
        # What was changed in place may have been known elsewhere, too.
        if value is not before.attributes.get(place) or not isinstance(value, (list, dict, set)):
            with contextlib.suppress(ValueError):
                return Attribute.of(*place, value)
    raise Unrepeatable(f"its code changes {'.'.join(place)} of the model")


def _is_repeatable(returned: object) -> TypeGuard[Returned]:
    if isinstance(returned, (set, frozenset, list, tuple)):
        return type(returned).__module__ == "builtins" and all(isinstance(name, str) for name in returned)
    return returned is None


def _step(entry: _Copied | _Filled, target: str, sources: _Sources) -> Step:
    if isinstance(entry, _Filled):
        return FillStep(entry.position, target, entry.geometry, entry.value)
    destination = sources.geometry(entry.dtype, entry.shape, entry.strides, entry.offset)
    return CopyStep(entry.position, sources.add(entry.base, entry.layout), target, destination)


class _Sources:
    """Names the tensors of the checkpoint, and numbers what is computed of them."""

    def __init__(self) -> None:
        self.expressions: list[Expression] = []
        self._numbers: dict[Base, int] = {}
        self._geometries: dict[Hashable, Geometry] = {}

    def geometry(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int) -> Geometry:
        """Return the one geometry that all steps share for which it is the same."""
        key = dtype, shape, strides, offset
        known = self._geometries.get(key)
        if known is None:
            known = self._geometries[key] = Geometry(dtype, tuple(shape), tuple(strides), offset)
        return known

    def add(self, base: Base, layout: Layout) -> Source:
        geometry = self.geometry(layout.dtype, layout.shape, layout.strides, layout.offset)
        if isinstance(base, FileBase):
            return Source(base.info.name, geometry)
        number = self._numbers.get(base)
        if number is None:
            assert isinstance(base, DeferredBase)
            lazies = base.inputs()
            numbers = {id(lazy): place for place, lazy in enumerate(lazies)}
            try:
                arguments = plain((base.args, base.kwargs), lambda lazy: numbers[id(lazy)])
            except ValueError as error:
                raise Unrepeatable(f"its code computes {describe_base(base)} with {error}") from error
            inputs = tuple(self.add(lazy.lazy_base, lazy.lazy_layout) for lazy in lazies)
            number = self._numbers[base] = len(self.expressions)
            self.expressions.append(Expression(name_of(base.func), arguments, inputs))
        return Source(number, geometry)


def _geometry_of(tensor: torch.Tensor) -> Geometry:
    return Geometry(tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, LazyTensor):
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain_tensors(item)
    elif isinstance(value, dict):
        yield from _plain_tensors(list(value.values()))
