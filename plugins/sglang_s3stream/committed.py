"""What a served model's weights were loaded from, which an update starts from and returns to when it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamer.config import StreamConfig
from streamer.update.revision import Revision

__all__ = ["Committed", "committed_of"]

_ATTRIBUTE = "_s3stream_committed"


@dataclass(frozen=True, slots=True)
class Committed:
    """The last load that succeeded on all ranks, kept on SGLang's ``ModelConfig``, one for each model of a process.

    SGLang makes a loader anew for each update, of a configuration that has lost everything but the load format.

    Attributes:
        revision: what was read.
        model_path: of SGLang's ``ModelConfig`` then.
        options: of the load.
        ignore_patterns: of SGLang's ``LoadConfig``.
        loaded: parameters that got values.
        stuck: parameters that SGLang's preparation for kernels has changed so that nothing can be loaded into them.
        has_undone: SGLang undoes its preparation of some layers before it loads, so that these must be loaded then.
        is_own_draft: a draft model whose checkpoint is not the target model's.
        storages: of a draft model, where each parameter's memory is.
        borrowed: of a draft model, parameters that are another model's meanwhile.
    """

    revision: Revision
    model_path: str
    options: StreamConfig
    ignore_patterns: tuple[str, ...] | str = ()
    loaded: frozenset[str] = frozenset()
    stuck: tuple[str, ...] = ()
    has_undone: bool = False
    is_own_draft: bool = False
    storages: Mapping[str, int] = dataclasses.field(default_factory=dict)
    borrowed: frozenset[str] = frozenset()

    def keep_on(self, model_config: Any) -> None:
        """Let this be what `model_config` is served with from now on."""
        setattr(model_config, _ATTRIBUTE, self)


def committed_of(model_config: Any) -> Committed | None:
    """Return what was kept on `model_config`, or None if s3stream has not loaded it."""
    found = getattr(model_config, _ATTRIBUTE, None)
    return found if isinstance(found, Committed) else None
