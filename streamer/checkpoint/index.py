"""The ``*.safetensors.index.json`` that Transformers writes beside sharded checkpoints."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

from streamer.checkpoint.sniff import name_foreign_body
from streamer.errors import CheckpointError

__all__ = ["INDEX_SUFFIX", "MAX_INDEX_BYTES", "Index", "parse_index"]

INDEX_SUFFIX = ".safetensors.index.json"
#: DeepSeek-V3's index, with 90,000 tensors, has 9 MB; ten times that is still no checkpoint.
MAX_INDEX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Index:
    """Which file holds which tensor; file keys are relative to the checkpoint's root."""

    key: str
    weight_map: Mapping[str, str]

    @property
    def files(self) -> tuple[str, ...]:
        """The distinct files, sorted."""
        return tuple(sorted(set(self.weight_map.values())))


def parse_index(key: str, body: bytes, label: str) -> Index:
    """Parse an index.

    Args:
        key: the index's key, relative to the root; shards are relative to its folder.
        body: the whole object.
        label: how to name it in errors.

    Raises:
        CheckpointError: not an index, or one that names files outside the checkpoint.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        foreign = name_foreign_body(body[:512])
        what = f"is {foreign}" if foreign else f"is not valid JSON ({error})"
        raise CheckpointError(f"{label} {what}", hint="upload the real file") from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{label} has no weight_map", hint="delete it, or set index=ignore to read the files without it"
        )
    folder = posixpath.dirname(key)
    resolved = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise CheckpointError(f"{label} maps tensor {name!r} to {file!r}, which is not a file name")
        target = posixpath.join(folder, file)
        if posixpath.isabs(file) or ".." in file.split("/"):
            raise CheckpointError(f"{label} maps tensor {name!r} to {file!r}, outside the checkpoint")
        resolved[name] = target
    return Index(key=key, weight_map=resolved)
