"""What a model's tensors were when loading began, which is the form that its loading code knows.

Afterwards vLLM turns them into what kernels want: packed, transposed, quantised, sometimes gone. An update needs the
first form again, with the attributes that the loaders go by, and has to know which of the tensors a load writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from streamer.trace.pending import storage_key, storage_of
from streamer.trace.writes import WriteLog

__all__ = ["Layer", "Layout", "Place", "Tensors", "tensors_in"]

#: What vLLM wraps loaders in, to process layers while others are still loaded.
_ONLINE = "online_process_loader"
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_DEPTH = 3  # of containers inside a module's attributes


class _Nothing:
    """Has no attributes."""


@dataclass(slots=True, eq=False)
class Place:
    """A parameter or buffer of one module, as it was when loading began.

    Attributes:
        name: with the module's.
        kind: the tensor's class.
        attributes: its own, such as ``weight_loader``.
        identity: equal for places of the same tensor.
        storage: equal for tensors that shared memory.
        is_late: it was made by the code that loads, which therefore does not find it there.
        is_loaded: whether loading wrote to it.
        initial: what it held if loading did not, kept where the layer's processing may look at it.
    """

    name: str
    kind: type[torch.Tensor]
    attributes: dict[str, Any]
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    identity: int
    storage: int
    storage_bytes: int
    was_meta: bool
    is_late: bool = False
    is_loaded: bool = True
    initial: torch.Tensor | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Place:
        return cls(
            name,
            type(tensor),
            dict(vars(tensor)),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            id(tensor),
            storage_key(tensor),
            storage_of(tensor).nbytes(),
            tensor.is_meta,
        )

    def fits(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and tensor.shape == self.shape and tensor.dtype == self.dtype

    def dress(self, bare: torch.Tensor) -> torch.Tensor:
        """Make `bare` what the tensor was to the code that loads: its class and attributes."""
        bare.__class__ = self.kind
        vars(bare).update(self.attributes)
        loader: Any = getattr(bare, "weight_loader", None)
        if getattr(loader, "__name__", "") == _ONLINE:
            while getattr(loader, "__name__", "") == _ONLINE:
                loader = loader.__wrapped__
            bare.weight_loader = loader  # type: ignore[attr-defined]
        return bare


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One module's tensors and children, by their names; None is a name without one.

    Attributes:
        transient: names of buffers that are not part of a state dict.
        method: attributes of what processes the layer; some of it works otherwise when it finds them set.
    """

    module: nn.Module
    name: str
    parameters: dict[str, Place | None]
    buffers: dict[str, Place | None]
    transient: set[str]
    children: dict[str, nn.Module | None]
    method: dict[str, Any]

    def places(self) -> dict[str, Place]:
        return {name: place for name, place in {**self.parameters, **self.buffers}.items() if place is not None}

    def loaded(self) -> dict[str, Place]:
        return {name: place for name, place in self.places().items() if place.is_loaded}


@dataclass(slots=True, eq=False)
class Layout:
    """All layers of a model.

    Attributes:
        tensors: those of the beginning, until it is known which of them were written to.
    """

    layers: list[Layer]
    tensors: dict[Place, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Layout | None:
        """Take down what `model` is before its weights are loaded; None if tensors have no shapes yet."""
        if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
            return None
        tensors: dict[Place, torch.Tensor] = {}

        def take(prefix: str, held: Mapping[str, torch.Tensor | None]) -> dict[str, Place | None]:
            places: dict[str, Place | None] = {}
            for name, tensor in held.items():
                places[name] = None
                if tensor is not None:
                    place = places[name] = Place.of(f"{prefix}.{name}".lstrip("."), tensor)
                    tensors[place] = tensor
            return places

        layers = [
            Layer(
                module,
                name,
                take(name, module._parameters),
                take(name, module._buffers),
                set(module._non_persistent_buffers_set),
                dict(module._modules),
                dict(vars(getattr(module, "quant_method", None) or _Nothing())),
            )
            for name, module in model.named_modules()
        ]
        return cls(layers, tensors)

    def settle(self, writes: WriteLog) -> None:
        """Note what loading wrote to, right after it, before vLLM processes what waited for that."""
        for layer in self.layers:
            self._add_late(layer)
            places = layer.places().values()
            for place in places:
                # What was on meta has got memory since, and was given it to be loaded.
                place.is_loaded = place.was_meta or writes.reached(self.tensors[place])
            if any(place.is_loaded for place in places):
                for place in places:
                    if not place.is_loaded:
                        place.initial = self.tensors[place].detach().to("cpu", copy=True)
        self.tensors.clear()

    def _add_late(self, layer: Layer) -> None:
        """Take down what the code that loads has added to `layer`, unless vLLM has processed that already."""
        if any(place.was_meta for place in layer.places().values()):
            return
        for places, held in ((layer.parameters, layer.module._parameters), (layer.buffers, layer.module._buffers)):
            for name, tensor in held.items():
                if tensor is not None and places.get(name) is None:
                    place = places[name] = Place.of(f"{layer.name}.{name}".lstrip("."), tensor)
                    place.is_late = True
                    self.tensors[place] = tensor

    def loaded(self) -> Iterator[Place]:
        for layer in self.layers:
            yield from layer.loaded().values()

    def nbytes(self) -> int:
        """Return how much memory the loaded tensors take in the form in which they are loaded."""
        return sum({place.storage: place.storage_bytes for place in self.loaded()}.values())


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """What a module holds at one moment, to be put back: all but the values."""

    module: nn.Module
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    children: dict[str, Any]
    transient: set[str]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> Tensors:
        own = {name: value for name, value in vars(module).items() if name not in _REGISTRIES}
        transient = set(module._non_persistent_buffers_set)
        return cls(module, dict(module._parameters), dict(module._buffers), dict(module._modules), transient, own)

    def exchange(self, **held: Any) -> None:
        """Let the module hold other things: parameters, buffers, children, transient."""
        new = dataclasses.replace(self, **held)
        for ours, theirs in (
            (new.parameters, self.module._parameters),
            (new.buffers, self.module._buffers),
            (new.children, self.module._modules),
        ):
            theirs.clear()
            theirs.update(ours)
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(new.transient)

    def put_back(self, *, attributes: bool) -> None:
        """Let the module hold what it held, its own attributes too if asked for."""
        self.exchange()
        if attributes:
            own = vars(self.module)
            for name in own.keys() - self.attributes.keys() - _REGISTRIES:
                del own[name]
            own.update(self.attributes)

    def all(self) -> Iterator[torch.Tensor]:
        """Yield every tensor: parameters, buffers, and those in attributes."""
        for value in (self.parameters, self.buffers, self.attributes):
            yield from (tensor for _, tensor in tensors_in(value))

    def beside(self) -> dict[str, torch.Tensor]:
        """Return the tensors in attributes, by where they are."""
        return dict(tensors_in(self.attributes))


def tensors_in(value: Any, name: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in `value`, a tensor or a container, by where they are."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(item, f"{name}.{key}" if name else str(key), depth - 1)
