"""Holds a folder on this machine against what it was copied from, however it was copied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streamer.artifacts.choice import choose
from streamer.artifacts.digests import BLOCK_BYTES, Progress, differences, digest_others, make_manifest
from streamer.artifacts.metadata import PINS_FILE, Mode, read_marker
from streamer.checkpoint.manifest import MANIFEST_KEY, MAX_MANIFEST_BYTES, Manifest, parse_manifest
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, ObjectNotFoundError
from streamer.fetch.headers import read_object
from streamer.sources.base import Source
from streamer.sources.local import LocalSource

__all__ = ["Comparison", "compare_copy", "read_manifest"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it.

    Attributes:
        problems: one sentence each.
        found: digests of what is in the folder.
        used_manifest: the source's manifest said what its bytes are; else they were read.
    """

    problems: list[str]
    found: Manifest
    used_manifest: bool


async def read_manifest(source: Source) -> Manifest | None:
    """Return the manifest that lies beside the weights, or None.

    Raises:
        CheckpointError, SourceError: see `streamer.errors`.
    """
    try:
        item = await source.stat(MANIFEST_KEY)
    except ObjectNotFoundError:
        return None
    body = await read_object(source, item, limit_bytes=MAX_MANIFEST_BYTES)
    return parse_manifest(body, source.label(MANIFEST_KEY))


async def compare_copy(
    source: Source, folder: Path, config: StreamConfig, *, progress: Progress | None = None
) -> Comparison:
    """Compare every byte of `folder` with `source`: by the source's manifest, or by reading both.

    A folder that was filled by ``s3stream fetch`` need hold no more than its mode says; any other, everything.

    Raises:
        CheckpointError: the folder holds the weights of some ranks only, or there is nothing to compare.
        SourceError: see `streamer.errors`.
    """
    marker = read_marker(folder)
    if marker is not None and marker.partial is not None:
        raise CheckpointError(
            f"{folder} is partial: of the weights, it holds only what {marker.partial} needs",
            hint="complete it with `s3stream fetch --mode all`, or look at it with `s3stream fetch --check`",
        )
    mode: Mode = "all" if marker is None else marker.mode
    expected = await read_manifest(source)
    used_manifest = expected is not None
    if expected is None:
        expected = await _read(source, config, mode, BLOCK_BYTES, progress)
    copy = LocalSource(folder, threads=config.concurrency)
    try:
        found = await _read(copy, config, mode, expected.block_bytes, progress, is_copy=True)
    finally:
        await copy.close()
    others = expected.others
    if mode == "weights":  # of the rest, only what says which weights they are
        others = {key: digest for key, digest in others.items() if key in found.others}
    expected = Manifest(expected.block_bytes, {} if mode == "metadata" else expected.files, others)
    return Comparison(differences(expected, found), found, used_manifest)


async def _read(
    source: Source,
    config: StreamConfig,
    mode: Mode,
    block_bytes: int,
    progress: Progress | None,
    *,
    is_copy: bool = False,
) -> Manifest:
    if mode != "metadata":
        return await make_manifest(source, config, progress=progress, block_bytes=block_bytes)
    items = [item for item in await source.list() if item.key != PINS_FILE]
    # What is in the copy is told by the other side: without weights, nothing tells those beside them from the model's.
    keys = [item.key for item in (items if is_copy else await choose(source, config, items, mode))]
    return Manifest(block_bytes, {}, await digest_others(source, keys))
