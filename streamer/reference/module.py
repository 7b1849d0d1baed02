"""`LoadableModule`: loading by recursion.

One walk over the children decides where every tensor of a checkpoint goes, gives parameters on meta
their memory, and later runs each module's post-processing. There is no table of the architecture: a
fused layer names the source modules it is made of (`LoadableModule.shard_names`), and the routes follow.
Parameters are plain tensors; how a tensor is split over ranks is known only to the layer that owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from streamer.errors import LoadError

__all__ = ["LoadableModule", "copy_exact"]


@dataclass(frozen=True, slots=True)
class _Route:
    """Where one tensor of the checkpoint goes."""

    owner: LoadableModule
    parameter: str
    shard: str | None
    name: str  # of the parameter, seen from the root


class LoadableModule(nn.Module):
    """A module that loads itself and its children."""

    shard_names: tuple[str, ...] = ()
    """Source modules that this one fuses, in the order of their rows; they replace its own name."""

    load_device: torch.device | None = None
    """Where `load_weights`, called on this module, puts parameters that are on meta; None leaves them there."""

    def load_parameter(self, parameter: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Put `tensor`, whole as in the checkpoint, where this rank's `parameter` wants it.

        Args:
            parameter: name of one of this module's own parameters.
            shard: one of `shard_names`, in fused layers.

        Raises:
            LoadError: the shape does not fit.
        """
        copy_exact(self.get_parameter(parameter), tensor, f"{type(self).__name__}.{parameter}")

    def finish_loading(self) -> None:
        """Post-process this module's own parameters, once all tensors have been offered."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load from an iterable of ``(name, tensor)``, in any order; unknown names are passed over.

        Args:
            weights: whole tensors of the checkpoint.

        Returns:
            The names of the parameters that were loaded.
        """
        modules = dict(_walk(self, ""))
        if self.load_device is not None:
            self._materialise(modules.values(), self.load_device)
        routes = _routes(modules)
        loaded = set()
        for name, tensor in weights:
            route = routes.get(name)
            if route is not None:
                route.owner.load_parameter(route.parameter, tensor, route.shard)
                loaded.add(route.name)
        for module in modules.values():
            if isinstance(module, LoadableModule):
                module.finish_loading()
        return loaded

    @staticmethod
    def _materialise(modules: Iterable[nn.Module], device: torch.device) -> None:
        made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    made.setdefault(
                        id(parameter), nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
                    )
                    module._parameters[name] = made[id(parameter)]


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.")


def _routes(modules: Mapping[str, nn.Module]) -> dict[str, _Route]:
    routes = {}
    owners: dict[int, str] = {}
    for prefix, module in modules.items():
        if not isinstance(module, LoadableModule):
            continue
        for parameter, value in module.named_parameters(recurse=False):
            if owners.setdefault(id(value), prefix) != prefix:
                continue  # tied: loaded by the module that comes first
            if not module.shard_names:
                routes[prefix + parameter] = _Route(module, parameter, None, prefix + parameter)
            for shard in module.shard_names:
                beside = prefix.removesuffix(".").rpartition(".")[0]
                source = f"{beside}.{shard}.{parameter}" if beside else f"{shard}.{parameter}"
                routes[source] = _Route(module, parameter, shard, prefix + parameter)
    return routes


def copy_exact(destination: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
    """Copy without broadcasting.

    Raises:
        LoadError: the shapes differ.
    """
    if destination.shape != tensor.shape:
        raise LoadError(f"{what} has shape {list(destination.shape)}, the checkpoint offers {list(tensor.shape)}")
    destination.data.copy_(tensor)
