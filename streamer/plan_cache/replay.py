"""Does again what a recipe says, in the place of a model's loading code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
from streamer.trace.tracer import Tracer, Weights

__all__ = ["replay"]

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
    with fewer_full_collections(), torch.no_grad():
        _do_again(recipe, list(_aim(recipe, model, {info.name: info for info in tensors})), tracer, weights)
    for name in recipe.looked_at:
        tracer.bases[name].looked_at = True
    for attribute in recipe.attributes:
        vars(model.get_submodule(attribute.module))[attribute.name] = attribute.new_value()
    return recipe.returned


def _do_again(recipe: Recipe, aimed: Sequence[tuple[Step, torch.Tensor]], tracer: Tracer, weights: Weights) -> None:
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
    for asked in range(recipe.asked):
        do_until(asked)
        next(iterator, None)
    do_until(recipe.asked)


class _Sources:
    """Makes lazy tensors of what steps and expressions refer to."""

    def __init__(self, recipe: Recipe, tracer: Tracer) -> None:
        self._expressions = recipe.expressions
        self._tracer = tracer
        self._layouts: dict[int, Layout] = {}  # by the id of a geometry, which the recipe keeps
        self._computed: dict[int, Base] = {}
        self._inputs: dict[Source, LazyTensor] = {}  # what several expressions take is fetched once

    def lazy(self, source: Source) -> LazyTensor:
        layout = self._layouts.get(id(source.geometry))
        if layout is None:
            layout = self._layouts[id(source.geometry)] = _layout(source.geometry)
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
    found: dict[str, torch.UntypedStorage] = {}
    whole: dict[tuple[str, torch.dtype], torch.Tensor] = {}
    end_of = _Ends()
    for given in [source for expression in recipe.expressions for source in expression.sources]:
        _check(given, recipe, tensors, end_of)
    for step in recipe.steps:
        name, place = step.target, step.destination
        storage = found.get(name)
        if storage is None:
            target = targets.get(name)
            if target is None:
                raise _misfit(f"the model has no {name}")
            storage = found[name] = storage_of(target)
        if end_of(place) > storage.nbytes():
            raise _misfit(f"{name} has {storage.nbytes()} bytes, and one of its copies ends at {end_of(place)}")
        if isinstance(step, CopyStep):
            _check(step.source, recipe, tensors, end_of)
        root = whole.get((name, place.dtype))
        if root is None:
            root = torch.empty(0, dtype=place.dtype, device=targets[name].device).set_(storage)
            whole[name, place.dtype] = root
        yield step, root.as_strided(place.shape, place.strides, place.offset)


class _Ends:
    """Works out where a geometry ends, once for all steps that share it."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # by its id, since the recipe keeps it, and hashes and sums take as long

    def __call__(self, geometry: Geometry) -> int:
        known = self._known.get(id(geometry))
        if known is None:
            known = self._known[id(geometry)] = geometry.end
        return known


def _check(source: Source, recipe: Recipe, tensors: Mapping[str, TensorInfo], end_of: _Ends) -> None:
    if isinstance(source.of, int):
        if source.of >= len(recipe.expressions):
            raise _misfit(f"there is no expression {source.of}")
        return
    info = tensors.get(source.of)
    if info is None or end_of(source.geometry) > info.nbytes:
        raise _misfit(f"it takes bytes of {source.of} that the checkpoint does not have")


def _layout(geometry: Geometry) -> Layout:
    bare = torch.empty(0, dtype=geometry.dtype, device="meta")
    return Layout(bare.as_strided(geometry.shape, geometry.strides, geometry.offset))


def _misfit(why: str) -> LoadError:
    return LoadError(
        f"the plan that was kept of an earlier load does not fit: {why}",
        hint="load with plan_cache=false, and report this with the model's name and the parallel layout",
    )
