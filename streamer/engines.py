"""Engines whose loading code can be traced without running them.

Plugins offer theirs under the entry point group ``s3stream.engines``; the command line looks them up
by name, so that neither imports the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from torch import nn

from streamer.errors import ConfigError

__all__ = ["Engine", "ParallelLayout", "find_engine"]

GROUP = "s3stream.engines"


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How a model is spread: tensor- and pipeline-parallel sizes, and whether experts are split whole."""

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline


class Engine(Protocol):
    """Builds models to plan for."""

    def build(self, config: Mapping[str, Any], layout: ParallelLayout, rank: int) -> nn.Module:
        """Return one rank's model on the meta device, with a ``load_weights`` method.

        Args:
            config: the parsed ``config.json``.

        Raises:
            ConfigError: the layout cannot be.
            UnsupportedCheckpointError: the engine does not know the architecture.
        """


def find_engine(name: str) -> Engine:
    """Return the engine called `name`.

    Raises:
        ConfigError: there is none; the message lists those that are installed.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise ConfigError(
            f"there is no engine {name!r}", hint=f"installed: {', '.join(sorted(found)) or 'none; reinstall s3stream'}"
        )
    engine: Engine = found[name].load()()
    return engine
