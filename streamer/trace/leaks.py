"""What a model keeps of the tensors that it was given, beside its parameters: lazy ones would have no values later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from streamer.errors import LeakedLazyTensorError, shorten
from streamer.trace.lazy import LazyTensor
from streamer.trace.tracer import Tracer

__all__ = ["give_values", "refuse_leaks"]

_DEPTH = 3  # of containers inside a module's attributes

ValueOf = Callable[[LazyTensor], torch.Tensor]


def give_values(model: object, tracer: Tracer) -> None:
    """Fetch what `model` keeps in buffers and attributes, and put it in the place of the lazy tensors.

    Draft models keep a table of token ids so (SGLang's ``llama_eagle3.py``: ``hot_token_id``). Two views of the same
    tensor become two views of the same memory.

    Raises:
        SourceError: see `streamer.errors`.
    """
    if not isinstance(model, torch.nn.Module):
        return
    kept: dict[int, LazyTensor] = {}
    names = []
    for place in _places(model):
        found = [lazy for lazy in _lazies(place.value, place.depth) if not isinstance(lazy, torch.nn.Parameter)]
        if found:
            names.append(place.name)
            kept.update((id(lazy), lazy) for lazy in found)
    if not kept:
        return
    why = f"the model keeps {shorten(sorted(names))}"
    views = Counter(id(lazy.lazy_base) for lazy in kept.values())
    for lazy in kept.values():
        if views[id(lazy.lazy_base)] > 1 and lazy.lazy_base.owned is None:
            tracer.own(lazy, why)
    value_of = tracer.values.materialise(list(kept.values()), why)
    for place in _places(model):
        place.put(_with_values(place.value, place.depth, value_of))


def refuse_leaks(model: object) -> None:
    """Raise if a parameter, buffer or attribute of `model` is still lazy, or holds one that is.

    Raises:
        LeakedLazyTensorError: naming where.
    """
    if not isinstance(model, torch.nn.Module):
        return
    found = sorted({place.name for place in _places(model) if _holds_lazy(place.value, place.depth)})
    if found:
        raise LeakedLazyTensorError(
            f"the model keeps tensors of the checkpoint that were never fetched: {shorten(found)}",
            hint="load with mode=eager",
        )


class _Place:
    """Where a model may keep a lazy tensor: one entry of a module's or tensor's dictionary.

    Attributes:
        name: for messages.
        depth: of containers to look into.
    """

    def __init__(self, name: str, holder: dict[str, Any], key: str, depth: int) -> None:
        self.name = name
        self.depth = depth
        self._holder = holder
        self._key = key
        self.value = holder[key]

    def put(self, value: Any) -> None:
        if value is not self.value:
            self._holder[self._key] = value


def _places(model: torch.nn.Module) -> Iterator[_Place]:
    for prefix, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute in ("_parameters", "_buffers"):
                for name, tensor in list(value.items()):
                    full = f"{prefix}.{name}".lstrip(".")
                    yield _Place(full, value, name, 1)
                    if isinstance(tensor, torch.Tensor) and not isinstance(tensor, LazyTensor):
                        for key in list(vars(tensor)):
                            yield _Place(full, vars(tensor), key, 1)
            elif attribute != "_modules":
                yield _Place(f"{prefix}.{attribute}".lstrip("."), vars(module), attribute, _DEPTH)


def _lazies(value: Any, depth: int) -> Iterator[LazyTensor]:
    if isinstance(value, LazyTensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict, set)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _lazies(item, depth - 1)


def _holds_lazy(value: Any, depth: int) -> bool:
    return next(_lazies(value, depth), None) is not None


def _with_values(value: Any, depth: int, value_of: ValueOf) -> Any:
    """Return `value` with tensors for the lazy ones; containers that can be changed stay the same objects."""
    if isinstance(value, LazyTensor):
        return value if isinstance(value, torch.nn.Parameter) else value_of(value)
    if not depth or not _holds_lazy(value, depth):
        return value
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _with_values(item, depth - 1, value_of)
        return value
    items = [_with_values(item, depth - 1, value_of) for item in value]
    if isinstance(value, list):
        value[:] = items
        return value
    if isinstance(value, set):
        value.clear()
        value.update(items)
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
