"""Engines whose loading code can be traced without running them.

Plugins offer theirs under the entry point group ``s3stream.engines``; the command line looks them up
by name, so that neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from streamer.errors import ConfigError, MissingDependencyError

__all__ = ["Engine", "MetaParameters", "ParallelLayout", "RankModel", "find_engine"]

GROUP = "s3stream.engines"
_LEAST_META_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How a model is spread: tensor- and pipeline-parallel sizes, and whether experts are split whole."""

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class RankModel:
    """One rank's model, its large parameters on meta, and the engine's code that loads it."""

    model: nn.Module
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


class Engine(Protocol):
    """Builds models to plan for."""

    def build(self, folder: Path, layout: ParallelLayout, rank: int) -> RankModel:
        """Return one rank's model.

        Args:
            folder: holds everything of the checkpoint that is not weights, ``config.json`` first of all.

        Raises:
            CheckpointError: there is no ``config.json``, or it makes no sense.
            ConfigError: the layout cannot be.
            UnsupportedCheckpointError: the engine does not know the architecture.
        """


def find_engine(name: str) -> Engine:
    """Return the engine called `name`.

    Raises:
        ConfigError: there is none; the message lists those that there are.
        MissingDependencyError: its package is not installed.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise ConfigError(
            f"there is no engine {name!r}", hint=f"installed: {', '.join(sorted(found)) or 'none; reinstall s3stream'}"
        )
    try:
        engine: Engine = found[name].load()()
    except ImportError as error:
        if isinstance(error, MissingDependencyError):
            raise
        raise MissingDependencyError(
            f"tracing {name} needs the package {error.name}, which is not installed here",
            hint=f"run this where {name} is installed, or pip install 's3stream[{name}]'",
        ) from error
    return engine


class MetaParameters(TorchFunctionMode):
    """Gives large new tensors no memory.

    A default device of ``meta`` would do so for all, and some constructors look at values of small ones
    (expert maps, rotary frequencies).
    """

    _factories = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._factories:
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() * made.element_size() >= _LEAST_META_BYTES:
                return made
        return func(*args, **kwargs)
