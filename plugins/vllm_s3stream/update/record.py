"""What a model remembers of the weights that it has, for updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from streamer.artifacts.locate import Located
from streamer.errors import ConfigError, RollbackError
from streamer.session import OpenedPart
from streamer.update.revision import Revision
from vllm_s3stream.update.layout import Layout

__all__ = ["Served", "keep_record", "record_of", "updates_are_wanted"]

_ATTRIBUTE = "_s3stream_served"


@dataclass(slots=True, eq=False)
class Served:
    """Kept with the model, and gone with it.

    Attributes:
        layout: of its tensors when loading began.
        revision: what it was loaded from last.
        parts: how many checkpoints it was made of at first.
        lost: why it must not be run any more.
    """

    layout: Layout
    revision: Revision
    parts: int
    lost: RollbackError | None = None


def updates_are_wanted() -> bool:
    """Whether the engine that is being started has workers that could ask for one."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and bool(config.parallel_config.worker_extension_cls)


def keep_record(model: nn.Module, layout: Layout, opened: Sequence[tuple[Located, OpenedPart]]) -> None:
    """Remember what `model` was loaded from.

    Raises:
        SourceError: see `Revision.of`.
    """
    located, part = opened[0]
    revision = Revision.of(located, part.engine, part.opened)
    vars(model)[_ATTRIBUTE] = Served(layout, revision.named(located.url), len(opened))


def record_of(model: nn.Module) -> Served:
    """Return what was kept.

    Raises:
        ConfigError: nothing was.
        RollbackError: the model's weights are a mixture.
    """
    served: Served | None = vars(model).get(_ATTRIBUTE)
    if served is None:
        raise ConfigError(
            f"{type(model).__name__} was not loaded so that it can be updated",
            hint="start the engine with --load-format s3stream and --worker-extension-cls vllm_s3stream.update.Updates",
        )
    if served.lost is not None:
        raise served.lost
    return served
