"""What ``--model-loader-extra-config`` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamer.config import StreamConfig
from streamer.errors import ConfigError

__all__ = ["PluginOptions"]


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """Options of the library and of this plugin.

    Attributes:
        stream: every option of `StreamConfig`.
        sharded: the checkpoint is a vLLM state dict with files of its own for each rank, as
            ``save_sharded_state`` writes it.
        pattern: of those files' names; vLLM's own default if None.
        enable_weights_track: as for vLLM's default loader.
    """

    stream: StreamConfig
    sharded: bool = False
    pattern: str | None = None
    enable_weights_track: bool | None = None

    @classmethod
    def parse(cls, extra: Any) -> PluginOptions:
        """Check ``model_loader_extra_config``; unknown keys and wrong types are errors.

        Raises:
            ConfigError: naming the key, and the nearest known one.
        """
        if not isinstance(extra, Mapping):
            raise ConfigError(f"model_loader_extra_config must be a mapping, not {type(extra).__name__}")
        rest = dict(extra)
        sharded = rest.pop("sharded", False)
        if not isinstance(sharded, bool):
            raise ConfigError(f"option sharded must be true or false, not {sharded!r}")
        pattern = rest.pop("pattern", None)
        if pattern is not None and not (isinstance(pattern, str) and pattern.endswith(".safetensors")):
            raise ConfigError(f"option pattern must be a name ending in .safetensors, not {pattern!r}")
        if pattern is not None and not sharded:
            raise ConfigError("option pattern is for sharded checkpoints", hint="set sharded=true too")
        track = rest.pop("enable_weights_track", None)
        if track is not None and not isinstance(track, bool):
            raise ConfigError(f"option enable_weights_track must be true or false, not {track!r}")
        return cls(StreamConfig.resolve(rest), sharded, pattern, track)
