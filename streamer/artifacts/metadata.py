"""Pulls what goes with a model's weights into a folder, once per node, and remembers which objects it saw.

An engine wants a local folder with ``config.json``, the tokenizer and, sometimes, code. It gets one whose
name is a digest of the listing: another process that finds the same listing uses the same folder, and a
changed object means another folder, so a running engine never sees files change under it. A folder is
published by renaming it when it is complete; a lock keeps a node's processes from pulling the same thing
side by side, and protects nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streamer.cache import cache_folder
from streamer.checkpoint.manifest import MANIFEST_KEY, parse_manifest
from streamer.checkpoint.partial import PINS_FILE, Partial
from streamer.checkpoint.select import Listed, accompanying, has_weights_beside
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, ConfigError, IntegrityError, StreamError
from streamer.fetch.headers import read_index
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.open import local_path, open_source
from streamer.transport.loop import LoopThread

__all__ = ["PINS_FILE", "Mode", "PulledFolder", "metadata_folder", "pull", "read_marker", "read_pins", "refuse_escape"]

_FORMAT = 3  # 1 had no versions, 2 did not say what is here
#: Of a folder with files that are not whole, so that no earlier version of ours takes it for another one.
_PARTIAL_FORMAT = 4

#: Of the choice of files: a folder that was filled by another is not used. 1 left out weights beside the model.
_CHOICE = 2

#: Which files of a checkpoint to bring.
Mode = Literal["metadata", "weights", "all"]
_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PulledFolder:
    """A folder on this machine and what it was pulled from.

    Attributes:
        url: the root of the source.
        items: every object that was there, weights included.
        here: keys of those that are in the folder, whole.
        mode: what they make up, with those of `partial`.
        partial: files of weights of which only some ranks' bytes are there.
    """

    folder: Path
    url: str
    items: tuple[ObjectInfo, ...]
    here: tuple[str, ...]
    mode: Mode
    partial: Partial | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are in the folder."""
        here = set(self.here)
        partial = self.partial.files.values() if self.partial is not None else ()
        return sum(item.size for item in self.items if item.key in here) + sum(file.nbytes for file in partial)

    @property
    def files(self) -> int:
        """Files in the folder, whole or not."""
        return len(self.here) + (len(self.partial.files) if self.partial is not None else 0)

    def to_json(self) -> bytes:
        """Return what `PINS_FILE` in the folder says, once everything else is there."""
        document: dict[str, Any] = {
            "format": _FORMAT if self.partial is None else _PARTIAL_FORMAT,
            "url": self.url,
            "mode": self.mode,
            "objects": [[item.key, item.size, item.pin, item.version] for item in self.items],
            "here": list(self.here),
        }
        if self.partial is not None:
            document["partial"] = self.partial.to_document()
        return json.dumps(document).encode()


def pull(url: str, config: StreamConfig, *, everything: bool = False) -> PulledFolder:
    """Bring what goes with the weights of `url` to this machine, unless it is here already.

    That is what is not weights, and weights that engines look for in the folder: see `accompanying`.

    Args:
        everything: the weights too, for adapters, which engines read from files.

    Raises:
        CheckpointError: a key would leave the folder.
        ConfigError: the cache cannot be written to.
        IntegrityError: ``integrity=manifest``, and a file is not what the manifest says.
        SourceError: see `streamer.errors`.
    """
    source = open_source(url, config)
    loop = LoopThread(use_uvloop=config.use_uvloop)
    try:
        items = tuple(loop.run(_list(source)))
        wanted = items if everything else loop.run(_accompanying(source, config, items))
        for item in wanted:
            refuse_escape(source, item.key)
        folder = cache_folder(config, "models") / _name(source.url, items, everything, config.integrity)
        here = tuple(item.key for item in wanted)
        pulled = PulledFolder(folder, source.url, items, here, "all" if everything else "metadata")
        try:
            if not (folder / PINS_FILE).is_file():
                with _locked(folder):
                    if not (folder / PINS_FILE).is_file():
                        _publish(loop, source, wanted, pulled, config)
        except StreamError:
            raise
        except OSError as error:
            raise ConfigError(
                f"cannot keep the files of {source.url} in {folder}: {error.strerror or error}",
                hint="set cache_dir (S3STREAM_CACHE_DIR) to a folder that can be written to and has space",
            ) from error
        return pulled
    finally:
        loop.close(before=source.close)


async def _accompanying(source: Source, config: StreamConfig, items: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
    listing = [Listed(item.key, item.size) for item in items]
    is_index_needed = has_weights_beside(listing)
    index = await read_index(source, config, {i.key: i for i in items}, listing) if is_index_needed else None
    keys = accompanying(listing, index)
    return [item for item in items if item.key in keys]


def metadata_folder(url: str, config: StreamConfig) -> Path:
    """Return a folder on this machine with the files of `url` that are not weights; see `pull`."""
    return local_path(url) or pull(url, config).folder


def read_pins(folder: str | Path) -> PulledFolder | None:
    """Return where the weights of `folder` are, or None when it holds them itself or says nothing about them.

    Raises:
        ConfigError: what it says was written by another version, or damaged.
    """
    pulled = read_marker(folder)
    return pulled if pulled is not None and pulled.mode == "metadata" else None


def read_marker(folder: str | Path, name: str = PINS_FILE) -> PulledFolder | None:
    """Return what `folder` was filled from, or None when it was not, or not completely.

    Args:
        name: of the file that says so.

    Raises:
        ConfigError: it was written by another version, is damaged, or cannot be read.
    """
    path = Path(folder) / name
    try:
        document = json.loads(path.read_text())
        if document["format"] not in (_FORMAT, _PARTIAL_FORMAT):
            raise ValueError("another format")
        items = tuple(ObjectInfo(*entry) for entry in document["objects"])
        partial = Partial.from_document(document["partial"]) if document["format"] == _PARTIAL_FORMAT else None
        here = tuple(document["here"])
        return PulledFolder(Path(folder), document["url"], items, here, document["mode"], partial)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="run as a user who may read it") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        hint = f"remove {Path(folder)}"
        raise ConfigError(f"{path} was not written by this version of s3stream", hint=hint) from error


async def _list(source: Source) -> Sequence[ObjectInfo]:
    return await source.list()


def refuse_escape(source: Source, key: str) -> None:
    """See that `key` names a file below a folder.

    Raises:
        CheckpointError: it would leave the folder, or be taken for one of our own files.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in key or key == PINS_FILE:
        raise CheckpointError(
            f"{source.url} holds an object whose key {key!r} is no path inside a folder", hint="remove or rename it"
        )


def _name(url: str, items: Sequence[ObjectInfo], everything: bool, integrity: str) -> str:
    """Name a folder so that whoever wants the same, checked alike, finds it."""
    listing = sorted((item.key, item.size, item.pin, item.version) for item in items)
    digest = hashlib.sha256(json.dumps([_FORMAT, _CHOICE, url, everything, integrity, listing]).encode()).hexdigest()
    # Engines put the folder's name into messages; let it be recognisable.
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", url.partition("://")[2]).strip("-.")[-60:]
    return f"{readable}-{digest[:20]}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, by whatever end
        yield


def _publish(
    loop: LoopThread,
    source: Source,
    wanted: Sequence[ObjectInfo],
    pulled: PulledFolder,
    config: StreamConfig,
) -> None:
    folder = pulled.folder
    for left in folder.parent.glob(f".{folder.name}.*/"):
        shutil.rmtree(left, ignore_errors=True)  # we hold the lock, so whoever made it was killed
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        unfinished.chmod(0o755)  # mkdtemp keeps other users out, who may run the workers
        loop.run(_download(source, wanted, unfinished, config.concurrency))
        if config.integrity == "manifest" and any(item.key == MANIFEST_KEY for item in wanted):
            _check(source, wanted, unfinished)
        (unfinished / PINS_FILE).write_bytes(pulled.to_json())
        shutil.rmtree(folder, ignore_errors=True)  # without its pins file it is not ours to trust
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _append(path: Path, body: bytearray) -> None:
    with path.open("ab") as file:
        file.write(body)


def _check(source: Source, items: Sequence[ObjectInfo], folder: Path) -> None:
    """Hold what was pulled against the manifest; a folder without one has weights that will not load anyway."""
    manifest = parse_manifest((folder / MANIFEST_KEY).read_bytes(), source.label(MANIFEST_KEY))
    for item in items:
        expected = manifest.others.get(item.key)
        if expected is not None and hashlib.sha256((folder / item.key).read_bytes()).hexdigest() != expected:
            raise IntegrityError(
                "the bytes are not those that the manifest was made of",
                url=source.label(item.key),
                hint="upload the file again, or make the manifest anew if it was changed on purpose",
            )


async def _download(source: Source, items: Sequence[ObjectInfo], folder: Path, concurrency: int) -> None:
    gate = asyncio.Semaphore(concurrency)

    async def download(item: ObjectInfo) -> None:
        path = folder / item.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        async with gate:
            for start in range(0, item.size, _CHUNK_BYTES):
                body = bytearray(min(_CHUNK_BYTES, item.size - start))
                await source.read_into(item, start, [memoryview(body)])
                await asyncio.to_thread(_append, path, body)

    tasks = [asyncio.ensure_future(download(item)) for item in items]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
