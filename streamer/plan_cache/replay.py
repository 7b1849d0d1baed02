"""Does again what a recipe says, in the place of a model's loading code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from streamer.checkpoint.checkpoint import TensorInfo
from streamer.errors import LoadError
from streamer.plan_cache.expressions import Geometry, Source, arguments_of, function_of
from streamer.plan_cache.recipe import CopyStep, Recipe, Returned, Step
from streamer.trace.collector import fewer_full_collections
from streamer.trace.layout import Layout
from streamer.trace.lazy import Base, LazyTensor, lazy_view
from streamer.trace.pending import storage_of
from streamer.trace.storages import named_tensors
from streamer.trace.tracer import Tracer

__all__ = ["replay"]

Weights = Iterable[tuple[str, torch.Tensor]]

_CPU = torch.device("cpu")


def replay(
    recipe: Recipe, model: torch.nn.Module, tracer: Tracer, weights: Weights, tensors: Sequence[TensorInfo]
) -> Returned:
    """Ask for as many of `weights` as the code did, and copy what it copied, when it did.

    So a rank that replays and one that traces meet as often while they load together.

    Args:
        tensors: of the checkpoint, under the names that they are handed out by.

    Raises:
        LoadError: the recipe does not fit. Nothing was done then.
    """
    aimed = list(_aim(recipe, model, {info.name: info for info in tensors}))
    sources = _Sources(recipe, tracer)
    done = 0

    def do_until(position: int) -> None:
        nonlocal done
        while done < len(aimed) and aimed[done][0].position <= position:
            step, destination = aimed[done]
            done += 1
            if isinstance(step, CopyStep):
                tracer.copies.record(destination, sources.lazy(step.source))
            else:
                tracer.copies.fill(destination, step.value)

    iterator = iter(weights)
    with fewer_full_collections(), torch.no_grad():
        for asked in range(recipe.asked):
            do_until(asked)
            next(iterator, None)
        do_until(recipe.asked)
    for name in recipe.looked_at:
        tracer.bases[name].looked_at = True
    for attribute in recipe.attributes:
        vars(model.get_submodule(attribute.module))[attribute.name] = attribute.new_value()
    return recipe.returned


class _Sources:
    """Makes lazy tensors of what steps and expressions refer to."""

    def __init__(self, recipe: Recipe, tracer: Tracer) -> None:
        self._expressions = recipe.expressions
        self._tracer = tracer
        self._layouts: dict[Geometry, Layout] = {}
        self._computed: dict[int, Base] = {}
        self._inputs: dict[Source, LazyTensor] = {}  # what several expressions take is fetched once

    def lazy(self, source: Source) -> LazyTensor:
        layout = self._layouts.get(source.geometry)
        if layout is None:
            layout = self._layouts[source.geometry] = _layout(source.geometry)
        base = self._tracer.bases[source.of] if isinstance(source.of, str) else self._compute(source.of)
        return lazy_view(base, layout, _CPU)

    def _input(self, source: Source) -> LazyTensor:
        lazy = self._inputs.get(source)
        if lazy is None:
            lazy = self._inputs[source] = self.lazy(source)
        return lazy

    def _compute(self, number: int) -> Base:
        """Have an expression computed when its values are needed, as the trace does."""
        base = self._computed.get(number)
        if base is None:
            expression = self._expressions[number]
            function = function_of(expression.function)
            inputs = [self._input(source) for source in expression.sources]
            args, kwargs = arguments_of(expression.arguments, inputs)
            result = self._tracer.dispatch(function, args, kwargs, inputs)
            if not isinstance(result, LazyTensor):
                raise _misfit(f"torch computes {expression.function} at once")
            base = self._computed[number] = result.lazy_base
        return base


def _aim(
    recipe: Recipe, model: torch.nn.Module, tensors: Mapping[str, TensorInfo]
) -> Iterator[tuple[Step, torch.Tensor]]:
    """Find the memory that each step writes to, and see that all its bytes are there."""
    targets = dict(named_tensors(model))
    found: dict[str, tuple[torch.UntypedStorage, int, torch.device]] = {}
    for given in [source for expression in recipe.expressions for source in expression.sources]:
        _check(given, recipe, tensors)
    for step in recipe.steps:
        name = step.target
        if name not in found:
            target = targets.get(name)
            if target is None:
                raise _misfit(f"the model has no {name}")
            storage = storage_of(target)
            found[name] = storage, storage.nbytes(), target.device
        storage, room, device = found[name]
        place = step.destination
        if place.end > room:
            raise _misfit(f"{name} has {room} bytes, and one of its copies ends at {place.end}")
        if isinstance(step, CopyStep):
            _check(step.source, recipe, tensors)
        bare = torch.empty(0, dtype=place.dtype, device=device)
        yield step, bare.set_(storage, place.offset, place.shape, place.strides)


def _check(source: Source, recipe: Recipe, tensors: Mapping[str, TensorInfo]) -> None:
    if isinstance(source.of, int):
        if source.of >= len(recipe.expressions):
            raise _misfit(f"there is no expression {source.of}")
        return
    info = tensors.get(source.of)
    if info is None or source.geometry.end > info.nbytes:
        raise _misfit(f"it takes bytes of {source.of} that the checkpoint does not have")


def _layout(geometry: Geometry) -> Layout:
    bare = torch.empty(0, dtype=geometry.dtype, device="meta")
    return Layout(bare.as_strided(geometry.shape, geometry.strides, geometry.offset))


def _misfit(why: str) -> LoadError:
    return LoadError(
        f"the plan that was kept of an earlier load does not fit: {why}",
        hint="load with plan_cache=false, and report this with the model's name and the parallel layout",
    )
