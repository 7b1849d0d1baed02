"""Finds the weights of what an engine calls a model: a URL, a folder pulled from one, a folder, a name on the hub."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamer.artifacts.metadata import pull, read_pins
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, UnsupportedCheckpointError, shorten
from streamer.sources import Source, open_source
from streamer.sources.base import ObjectInfo
from streamer.sources.partial import find_partial
from streamer.sources.pinned import PinnedSource

__all__ = ["FromHub", "Located", "is_url", "locate"]


def is_url(value: object) -> bool:
    """Whether `value` names something that is neither a local path nor a repository of the hub."""
    return isinstance(value, str) and "://" in value


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
        (``huggingface_hub.utils.filter_repo_objects``). Engines take local folders as they are.
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
                    hint="convert them to safetensors, or use the engine's default load format from a local folder",
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
