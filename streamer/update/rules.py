"""What must be so before the first byte of a serving model is overwritten."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

from streamer.checkpoint.select import Listed, weights_beside
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, ObjectChangedError, SourceError, shorten
from streamer.fetch.engine import FetchEngine
from streamer.update.revision import Revision

__all__ = ["different_settings", "refuse_lost", "refuse_other_model"]

#: Keys of ``config.json`` that say nothing about what the weights mean.
_BESIDE_THE_POINT = frozenset({"_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype"})


def refuse_other_model(serving: Revision, new: Revision) -> None:
    """See that `new` has the tensors of `serving`, each with the dtype and shape that it has there.

    The code that loads them is the model's, which was built for those. It may fail over others half-way, or put what
    it finds into the wrong place. Weights beside the checkpoint (see `streamer.checkpoint.select.accompanying`) must be
    the same, byte for byte: engines read them once, when they build the model.

    Raises:
        CheckpointError: it has not.
    """
    problems = []
    missing = sorted(serving.tensors.keys() - new.tensors.keys())
    if missing:
        problems.append(f"lacks {len(missing)} of its tensors: {shorten(missing)}")
    unknown = sorted(new.tensors.keys() - serving.tensors.keys())
    if unknown:
        problems.append(f"has {len(unknown)} that it has not: {shorten(unknown)}")
    different = [
        f"{name} ({_told(new.tensors[name])}, not {_told(serving.tensors[name])})"
        for name in sorted(serving.tensors.keys() & new.tensors.keys())
        if new.tensors[name] != serving.tensors[name]
    ]
    if different:
        problems.append(f"has {len(different)} with another dtype or shape: {shorten(different)}")
    changed = sorted(key for key in _beside(serving) | _beside(new) if not _is_same_file(key, serving, new))
    if changed:
        problems.append(f"has other weights beside the model's, which are not updated: {shorten(changed)}")
    if problems:
        raise CheckpointError(
            f"{new.url} does not fit the model that is served, from {serving.url}: it {'; it '.join(problems)}",
            hint="save it as the serving model was saved, or start the engine anew for another model",
        )


def _beside(revision: Revision) -> set[str]:
    return weights_beside([Listed(item.key, item.size) for item in revision.items], revision.files)


def _is_same_file(key: str, first: Revision, second: Revision) -> bool:
    try:
        return filecmp.cmp(first.folder / key, second.folder / key, shallow=False)
    except OSError:
        return False


def _told(tensor: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = tensor
    return f"{dtype} {list(shape)}"


def refuse_lost(serving: Revision, config: StreamConfig) -> None:
    """See that what is served could be read again, should the new weights fail.

    Every header is read, each only if the object is the one that was loaded.

    Raises:
        SourceError: it could not, for the objects were replaced or deleted, or the store is not well.
    """
    try:
        with FetchEngine(serving.source(config), config) as engine:
            engine.open_checkpoint(only=serving.files)
    except ObjectChangedError as error:
        error.message = f"no update, for there would be no way back to what is served now: {error.message}"
        error.hint = (
            "put every version under a URL of its own, or turn on versioning of the bucket; "
            "nothing was overwritten in memory"
        )
        raise
    except SourceError as error:
        error.message = f"no update, for what is served now could not be read again: {error.message}"
        raise


def different_settings(serving: Path, new: Path) -> list[str]:
    """Return the keys in which two models' ``config.json`` differ, sorted; engines keep the configuration they have."""
    first, second = _config_of(serving), _config_of(new)
    if first is None or second is None:
        return []
    keys = (first.keys() | second.keys()) - _BESIDE_THE_POINT
    return sorted(key for key in keys if first.get(key) != second.get(key))


def _config_of(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
