"""Loads new weights beside a model that is served: into tensors of their own, by the model's own code.

The model's modules hold twins of their tensors meanwhile, in host memory, in the form that the code knows, and
afterwards what they held before. Nothing that is served is written to: what is no twin is guarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from streamer.errors import LoadError, shorten
from streamer.trace.lazy import LazyTensor
from streamer.trace.ops import written_arguments
from streamer.trace.pending import storage_key
from streamer.trace.writes import WriteLog
from vllm_s3stream.update.layout import Layout, Place, Tensors

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["Guard", "Staged", "Twins"]

#: New values by place.
Staged = dict[Place, torch.Tensor]

_NO_UPDATE = "load it anew instead: start another engine"


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to some tensors' memory before they happen.

    Raises:
        LoadError: from the operation that would write.
    """

    def __init__(self, tensors: Iterator[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The tensors are kept, or the key of a freed one could become that of a twin.
        self._kept = [tensor for tensor in tensors if not isinstance(tensor, LazyTensor)]
        self._keys = {storage_key(tensor) for tensor in self._kept}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, name in written_arguments(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if self._is_served(tensor):
                    raise LoadError(
                        f"the model's loading code writes ({func._schema.name}) to memory that is served and that it "
                        "did not write to when the model was loaded",
                        hint=_NO_UPDATE,
                    )
        return func(*args, **kwargs)

    def _is_served(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor) and storage_key(value) in self._keys
        )


class Twins:
    """The exchange, while it lasts; a context manager.

    Attributes:
        guard: to be active while the model's code runs.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._before = [Tensors.of(module) for module in {*model.modules(), *(each.module for each in layout.layers)}]
        self._data = [(tensor, tensor.data) for each in self._before for tensor in each.all()]
        self.guard = Guard(tensor for tensor, _ in self._data)

    def __enter__(self) -> Twins:
        held = {each.module: each for each in self._before}
        storages = {
            storage: torch.zeros(nbytes, dtype=torch.uint8)  # only pages that are written to take memory
            for storage, nbytes in {place.storage: place.storage_bytes for place in self._layout.loaded()}.items()
        }
        twins: dict[int, torch.Tensor] = {}
        for layer in self._layout.layers:
            now = held[layer.module]
            for places, served in ((layer.parameters, now.parameters), (layer.buffers, now.buffers)):
                for name, place in places.items():
                    if place is not None and not place.is_late and place.identity not in twins:
                        twins[place.identity] = _twin(place, storages, served.get(name))
        # Whatever can fail has been done: from here on, there is something to undo.
        for layer in self._layout.layers:
            held[layer.module].exchange(
                parameters={name: place and twins.get(place.identity) for name, place in layer.parameters.items()},
                buffers={name: place and twins.get(place.identity) for name, place in layer.buffers.items()},
                children=layer.children,
                transient=layer.transient,
            )
        return self

    def collect(self, writes: WriteLog) -> Staged:
        """Return the new values, once the model's code has run.

        Raises:
            LoadError: it did not do what it did when the model was loaded.
        """
        staged: Staged = {}
        lacking, strange = [], []
        for layer in self._layout.layers:
            now: dict[str, Any] = {**layer.module._parameters, **layer.module._buffers}
            places = layer.places()
            strange += [f"{layer.name}.{name}" for name in now.keys() - places.keys() if now[name] is not None]
            for name, place in places.items():
                tensor = now.get(name)
                if tensor is None or tensor.shape != place.shape or tensor.dtype != place.dtype:
                    strange.append(place.name)
                elif place.is_loaded and writes.reached(tensor):
                    staged[place] = tensor
                elif place.is_loaded and not place.was_meta:
                    lacking.append(place.name)
        strange += self._kept_beside()
        if lacking:
            raise LoadError(
                f"{len(lacking)} parameters got values when the model was loaded and none now: {shorten(lacking)}"
            )
        if strange:
            raise LoadError(
                "the model's loading code makes tensors of its own, which would not be updated: "
                f"{shorten(sorted(strange))}",
                hint=_NO_UPDATE,
            )
        return staged

    def _kept_beside(self) -> Iterator[str]:
        """Name what the code put into attributes."""
        for before in self._before:
            known = before.beside()
            for name, tensor in Tensors.of(before.module).beside().items():
                if known.get(name) is not tensor:
                    yield f"{type(before.module).__name__}.{name}"

    def __exit__(self, *_: object) -> None:
        for each in self._before:
            each.put_back(attributes=True)
        for tensor, data in self._data:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data


def _twin(place: Place, storages: dict[int, torch.Tensor], served: torch.Tensor | None) -> torch.Tensor:
    if place.storage in storages:
        bare = torch.empty(0, dtype=place.dtype)
        bare.set_(storages[place.storage].untyped_storage(), place.offset, place.shape, place.stride)
        return place.dress(bare)
    if served is not None and place.fits(served):
        return served
    # It became something else, and loading does not write to it; the code may want to know that it is there.
    if place.initial is not None:
        return place.dress(place.initial.clone())
    return place.dress(torch.zeros(place.shape, dtype=place.dtype))
