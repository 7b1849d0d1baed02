"""Chooses, from a listing, the files that make up one copy of the weights.

The index decides. Without one, files that begin with ``model`` are taken, else whatever safetensors lie
at the root. Everything that is left out is listed with a reason, because two copies of a model in one
folder are common: consolidated files beside shards (https://github.com/vllm-project/vllm/issues/40765),
``original/``, or a whole ``.git`` (https://github.com/run-ai/runai-model-streamer/issues/25).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from streamer.checkpoint.index import INDEX_SUFFIX, Index
from streamer.errors import CheckpointError, IncompleteCheckpointError, UnsupportedCheckpointError, shorten

__all__ = [
    "MOST_BESIDE_BYTES",
    "Listed",
    "Selection",
    "Skipped",
    "accompanying",
    "choose_index",
    "has_weights_beside",
    "select_files",
    "weights_beside",
]

WEIGHTS_SUFFIX = ".safetensors"
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_OTHER_WEIGHT_SUFFIXES = (".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".tflite", ".npz", ".ot", ".nemo")
#: Larger files of weights are taken for other models, unless an index names them.
MOST_BESIDE_BYTES = 1 << 30
#: How files at the root are called that hold the model itself, or once more.
_MODEL_NAMES = ("model", "pytorch_model", "consolidated", "adapter")
_OTHER_COPIES = ("original", "onnx", "openvino", "coreml", "runs", "logs")
_SHARD_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})\.safetensors$")


@dataclass(frozen=True, slots=True)
class Listed:
    """One object below the checkpoint's root: key relative to the root, size in bytes."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """An object that is not loaded, and why."""

    key: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The files to load, in natural order; what was left out; and what engines look for beside them in a folder.

    The last is what is not weights, and small weights that their code reads by name; see `accompanying`.
    """

    weights: tuple[Listed, ...]
    skipped: tuple[Skipped, ...]
    metadata: tuple[Listed, ...]


def choose_index(listing: Sequence[Listed]) -> str | None:
    """Return the key of the index to obey, or None when there is none.

    Raises:
        CheckpointError: several indexes and no way to prefer one.
    """
    found = [item.key for item in listing if "/" not in item.key and item.key.endswith(INDEX_SUFFIX)]
    if "model" + INDEX_SUFFIX in found:
        return "model" + INDEX_SUFFIX
    others = [key for key in found if not key.startswith("consolidated")] or found
    if len(others) > 1:
        raise CheckpointError(
            f"several indexes and none is model{INDEX_SUFFIX}: {shorten(others)}",
            hint="keep the one of the weights to load, or set index=ignore",
        )
    return others[0] if others else None


def select_files(label: str, listing: Sequence[Listed], index: Index | None) -> Selection:
    """Split a listing into weights, skipped objects and metadata.

    Args:
        label: the checkpoint's URL, for errors.
        listing: every object below the root.
        index: the parsed index, or None to go by file names alone.

    Raises:
        IncompleteCheckpointError: the index, or the numbering of shards, names files that are not there.
        UnsupportedCheckpointError: there are weights, but none in safetensors form.
        CheckpointError: nothing that could be weights.
    """
    if index is not None:
        _require_indexed(label, listing, index)
        chosen = set(index.files)
    else:
        chosen = _by_name(label, listing)
    weights, skipped, metadata = [], [], []
    beside = weights_beside(listing, chosen)
    for item in listing:
        if item.key in chosen:
            weights.append(item)
            continue
        reason = None if item.key in beside else _skip_reason(item.key, index)
        if reason:
            skipped.append(Skipped(item.key, item.size, reason))
        else:
            metadata.append(item)
    if not weights:
        raise _nothing_to_load(label, listing)
    return Selection(
        weights=tuple(sorted(weights, key=lambda item: _natural(item.key))),
        skipped=tuple(sorted(skipped, key=lambda item: item.key)),
        metadata=tuple(sorted(metadata, key=lambda item: item.key)),
    )


def accompanying(listing: Sequence[Listed], index: Index | None) -> set[str]:
    """Return the keys of what an engine is to find in the model's folder: what is not weights, and weights beside it.

    Of the latter are the dense layers of sentence transformers (``2_Dense/model.safetensors``), adapters for tasks
    (``adapters/retrieval/adapter_model.safetensors``) and heads that the index leaves out. Engines read them from the
    folder, and several take one that is missing for one that is not wanted (vLLM's ``models/adapters.py`` and
    ``models/jina.py``), so that the model would answer wrongly.
    """
    chosen = set(index.files) if index is not None else set(_group_by_name(listing))
    return {item.key for item in listing if _skip_reason(item.key, None) is None} | weights_beside(listing, chosen)


def has_weights_beside(listing: Sequence[Listed]) -> bool:
    """Whether `accompanying` needs the index, to tell weights beside the model from the model's own."""
    return bool(weights_beside(listing, {""}))


def weights_beside(listing: Sequence[Listed], chosen: Collection[str]) -> set[str]:
    """Return the keys of weights that code may read by name, beside the `chosen` ones; see `accompanying`."""
    if not chosen:
        return set()  # whatever lies in subfolders is the model, or several
    found: dict[str, list[str]] = {}
    for item in listing:
        folder, name = posixpath.split(item.key)
        if (
            item.key in chosen
            or item.size > MOST_BESIDE_BYTES
            or not name.endswith((WEIGHTS_SUFFIX, *_PICKLED_SUFFIXES))
        ):
            continue
        parts = folder.split("/") if folder else []
        is_other_copy = parts[:1] and (parts[0] in _OTHER_COPIES or parts[0].startswith("checkpoint-"))
        if is_other_copy or any(part.startswith(".") for part in parts) or _is_training_state(name):
            continue
        if folder or not name.startswith(_MODEL_NAMES):
            found.setdefault(folder, []).append(item.key)
    keys = set()
    for folder, candidates in found.items():
        # A module's folder has the same weights pickled, sometimes; files at the root are a thing each.
        safe = [key for key in candidates if key.endswith(WEIGHTS_SUFFIX)] if folder else []
        keys.update(safe or candidates)
    return keys


def _require_indexed(label: str, listing: Sequence[Listed], index: Index) -> None:
    present = {item.key for item in listing}
    missing = [key for key in index.files if key not in present]
    if not missing:
        return
    safetensors = [key for key in present if key.endswith(WEIGHTS_SUFFIX)]
    pickled = [key for key in present if key.endswith(_PICKLED_SUFFIXES)]
    if not safetensors and pickled:
        raise UnsupportedCheckpointError(
            f"{label} has {index.key} but none of its {len(missing)} shards, only {shorten(sorted(pickled), 3)}",
            hint="pickled weights are never opened; convert them with `safetensors.torch.save_file`",
        )
    hint = "upload the missing shards"
    if safetensors:
        hint += ", or, if the other files hold every tensor, set index=ignore"
    raise IncompleteCheckpointError(
        f"{label} lacks {len(missing)} of the {len(index.files)} files that {index.key} names: {shorten(missing)}",
        hint=hint,
    )


def _by_name(label: str, listing: Sequence[Listed]) -> set[str]:
    chosen = _group_by_name(listing)
    _require_numbered(label, chosen)
    return set(chosen)


def _group_by_name(listing: Sequence[Listed]) -> Sequence[str]:
    root = [item.key for item in listing if "/" not in item.key and item.key.endswith(WEIGHTS_SUFFIX)]
    groups = (
        [key for key in root if key.startswith("model")],
        [key for key in root if not key.startswith(("consolidated", "adapter")) and not _is_training_state(key)],
        [key for key in root if key.startswith("consolidated")],
        [key for key in root if key.startswith("adapter")],
    )
    return next((group for group in groups if group), [])


def _require_numbered(label: str, keys: Sequence[str]) -> None:
    """Without an index, ``-00001-of-00003`` still says how many files there should be."""
    sets: dict[tuple[str, str], set[int]] = {}
    for key in keys:
        match = _SHARD_NAME.match(key)
        if match:
            sets.setdefault((match["stem"], match["total"]), set()).add(int(match["number"]))
    for (stem, total), numbers in sets.items():
        missing = [
            f"{stem}-{number:0{len(total)}d}-of-{total}{WEIGHTS_SUFFIX}"
            for number in range(1, int(total) + 1)
            if number not in numbers
        ]
        if missing:
            raise IncompleteCheckpointError(
                f"{label} lacks {len(missing)} of {int(total)} shards: {shorten(missing)}",
                hint="upload the missing shards",
            )


def _is_training_state(name: str) -> bool:
    return name.startswith(("optimizer", "scheduler", "random_states", "rng_state", "training_args"))


def _skip_reason(key: str, index: Index | None) -> str | None:
    """Return why `key` is not loaded, or None when it is metadata (config, tokenizer, code)."""
    folders, name = key.split("/")[:-1], posixpath.basename(key)
    hidden = next((folder for folder in folders if folder.startswith(".")), None)
    if hidden:
        return f"inside {hidden}/"
    if folders and folders[0] in _OTHER_COPIES:
        return f"inside {folders[0]}/"
    if name.endswith(WEIGHTS_SUFFIX):
        if name.startswith("consolidated"):
            return "a second copy of the weights in consolidated form"
        if name.startswith("adapter"):
            return "an adapter, not the model"
        if _is_training_state(name):
            return "training state"
        if index is not None:
            return f"not named by {index.key}"
        return "in a subfolder that no index names" if folders else "other files are the model"
    if _is_training_state(name):
        return "training state"
    if name.endswith(_PICKLED_SUFFIXES):
        return "pickled weights are never opened"
    if name.endswith(_OTHER_WEIGHT_SUFFIXES):
        return f"weights in {posixpath.splitext(name)[1][1:]} form"
    return None


def _nothing_to_load(label: str, listing: Sequence[Listed]) -> CheckpointError:
    keys = sorted(item.key for item in listing)
    gguf = [key for key in keys if key.endswith(".gguf")]
    pickled = [key for key in keys if key.endswith(_PICKLED_SUFFIXES) and not _is_training_state(key)]
    nested = [key for key in keys if key.endswith(WEIGHTS_SUFFIX)]
    if nested:
        folders = sorted({posixpath.dirname(key) for key in nested})
        return CheckpointError(
            f"{label} has no safetensors files at its root, only in {shorten(folders)}",
            hint="give the URL of the folder that holds the model",
        )
    if gguf:
        return UnsupportedCheckpointError(
            f"{label} has only GGUF weights ({shorten(gguf, 3)}), which cannot be streamed",
            hint="download the file and give its path to an engine that reads GGUF",
        )
    if pickled:
        return UnsupportedCheckpointError(
            f"{label} has only pickled weights ({shorten(pickled, 3)}), which are never opened",
            hint="convert them with `safetensors.torch.save_file` and upload the result",
        )
    found = f"only {shorten(keys, 5)}" if keys else "no objects"
    return CheckpointError(f"{label} has no safetensors files, {found}", hint="check the URL")


def _natural(key: str) -> tuple[object, ...]:
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", key))
