"""Where the weights of one of vLLM's sources are, and which of them to hand out."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamer.artifacts.metadata import pull, read_pins
from streamer.checkpoint.checkpoint import Checkpoint, TensorInfo
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, UnsupportedCheckpointError, shorten
from streamer.sources import Source, open_source
from streamer.sources.base import ObjectInfo
from streamer.sources.partial import find_partial
from streamer.sources.pinned import PinnedSource
from vllm_s3stream.urls import is_url

__all__ = ["Located", "ShardFilter", "locate"]

#: Downloads a repository of the hub; returns its folder and the paths of its weights.
FromHub = Callable[[str, str | None, str | None], tuple[str, list[str]]]


@dataclass(frozen=True, slots=True)
class Located:
    """The weights of one source.

    Attributes:
        url: where to read them.
        folder: on this machine, with at least what is not weights.
        items: the objects to read them from, pinned; None for a folder, whose files are listed anew.
        keys: of the files there are, relative to `url`.
    """

    url: str
    folder: Path
    items: tuple[ObjectInfo, ...] | None
    keys: tuple[str, ...]

    def without(self, patterns: Sequence[str] | str) -> Located:
        """Leave out remote files by ``ignore_patterns``, which mean what they mean to the hub's client.

        That is, shell patterns against the whole path, a trailing slash standing for a folder's contents
        (``huggingface_hub.utils.filter_repo_objects``). vLLM takes local folders as they are.
        """
        if self.items is None:
            return self
        listed = [patterns] if isinstance(patterns, str) else patterns
        listed = [pattern + "*" if pattern.endswith("/") else pattern for pattern in listed]
        stay = tuple(item for item in self.items if not any(fnmatch.fnmatch(item.key, pattern) for pattern in listed))
        return Located(self.url, self.folder, stay, tuple(item.key for item in stay))

    def chosen(self, patterns: Sequence[str] | None) -> list[str]:
        """Return the files to load, if the model or the format leaves no choice; else nothing.

        Mistral's own format (``params.json`` beside ``consolidated*.safetensors``) has names of its own, which
        vLLM's models expect when that is the configuration that they were built from.

        Args:
            patterns: the model's ``allow_patterns_overrides``; the first with any matches counts.

        Raises:
            CheckpointError: no pattern matches.
            UnsupportedCheckpointError: what matches is not safetensors.
        """
        if patterns is None:
            patterns = ["consolidated*.safetensors"]
            if "params.json" not in self.keys or not fnmatch.filter(self.keys, patterns[0]):
                return []
        for pattern in patterns:
            expression = re.compile(_translate(pattern))
            found = sorted(key for key in self.keys if expression.fullmatch(key))
            other = [key for key in found if not key.endswith(".safetensors")]
            if other:
                raise UnsupportedCheckpointError(
                    f"{self.url}: this model also needs {shorten(other)}, and pickled weights are never opened",
                    hint="convert them to safetensors, or use vLLM's default load format from a local folder",
                )
            if found:
                return found
        raise CheckpointError(
            f"{self.url} has no files that match {' or '.join(patterns)}, which this model's code asks for"
        )

    def source(self, config: StreamConfig) -> Source:
        source = open_source(self.url, config)
        return source if self.items is None else PinnedSource(source, self.items)


def _translate(pattern: str) -> str:
    """Translate a glob in which ``*`` and ``?`` stop at a slash, as Python's ``glob`` has them."""
    parts = []
    for part in re.split(r"(\*\*/|\*|\?|\[[^\]]*\])", pattern):
        special = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}.get(part)
        parts.append(special or (part if part.startswith("[") else re.escape(part)))
    return "".join(parts)


def locate(model: str, revision: str | None, subfolder: str | None, config: StreamConfig, from_hub: FromHub) -> Located:
    """Find the weights of `model`: a folder that we pulled, another folder, a URL, or a name on the hub.

    Raises:
        CheckpointError, SourceError: see `streamer.errors`.
    """
    pulled = pull(model, config) if is_url(model) and not model.startswith("file://") else read_pins(model)
    if pulled is not None:
        below = f"{subfolder.strip('/')}/" if subfolder else ""
        items = tuple(
            dataclasses.replace(item, key=item.key.removeprefix(below))
            for item in pulled.items
            if item.key.startswith(below)
        )
        url = pulled.url.rstrip("/") + "/" + below if below else pulled.url
        return Located(url, pulled.folder / below, items, tuple(item.key for item in items))
    path = model.removeprefix("file://")
    if os.path.isdir(path):
        folder = Path(path, subfolder or "")
        return Located(str(folder), folder, None, _keys(folder))
    hub_folder, files = from_hub(model, revision, subfolder)
    return Located(hub_folder, Path(hub_folder), None, tuple(os.path.relpath(file, hub_folder) for file in files))


def _keys(folder: Path) -> tuple[str, ...]:
    partial = find_partial(folder)
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return tuple(sorted({*found, *(partial.files if partial is not None else ())}))


class ShardFilter:
    """Decides, as vLLM's loader does, which tensors a model is not even shown.

    vLLM leaves out whole files, when nothing in them is wanted, and expert weights of other ranks.

    Args:
        folder: holds the index, by which vLLM tells the language model's files.
        is_unused: accepts the names of tensors that the model does not load.
        encoder_only_prefixes, weights_mapper: with ``--mm-encoder-only``, what belongs to the language model.
        local_expert_ids: this rank's, or None for all.
    """

    def __init__(
        self,
        folder: Path,
        *,
        is_unused: Callable[[str], bool] | None,
        encoder_only_prefixes: tuple[str, ...] | None,
        weights_mapper: Any,
        local_expert_ids: set[int] | None,
    ) -> None:
        self._folder = folder
        self._is_unused = is_unused
        self._prefixes = encoder_only_prefixes
        self._mapper = weights_mapper
        self._experts = local_expert_ids
        self._wanted: frozenset[int] | None = None

    def __call__(self, checkpoint: Checkpoint, info: TensorInfo) -> bool:
        if self._wanted is None:
            self._wanted = self._wanted_files(checkpoint)
        if info.file not in self._wanted:
            return False
        if self._experts is None:
            return True
        from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

        return not should_skip_weight(info.name, self._experts)

    def _wanted_files(self, checkpoint: Checkpoint) -> frozenset[int]:
        wanted = set(range(len(checkpoint.files)))
        if self._prefixes is not None:
            wanted &= self._with_encoder(checkpoint)
        if self._is_unused is not None:
            used = {info.file for info in checkpoint.tensors.values() if not self._is_unused(info.name)}
            wanted = (wanted & used) or wanted  # vLLM reads everything rather than nothing
        return frozenset(wanted)

    def _with_encoder(self, checkpoint: Checkpoint) -> set[int]:
        from vllm.model_executor.model_loader.weight_utils import filter_mm_encoder_only_safetensors_files

        index = next((path.name for path in sorted(self._folder.glob("*.safetensors.index.json"))), "")
        paths = {os.path.join(self._folder, file.key): number for number, file in enumerate(checkpoint.files)}
        kept = filter_mm_encoder_only_safetensors_files(
            list(paths), str(self._folder), index, self._prefixes, weights_mapper=self._mapper
        )
        if not kept:
            raise CheckpointError(
                f"{checkpoint.url}: every file holds the language model only, and --mm-encoder-only leaves it out"
            )
        return {paths[path] for path in kept}
