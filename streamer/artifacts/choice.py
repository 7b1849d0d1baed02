"""Which of a source's objects a folder is to hold."""

from __future__ import annotations

from collections.abc import Sequence, Set

from streamer.artifacts.metadata import PINS_FILE, Mode, PulledFolder, refuse_escape
from streamer.checkpoint.manifest import MANIFEST_KEY
from streamer.checkpoint.partial import Layout
from streamer.checkpoint.select import Listed, accompanying, has_weights_beside, select_files
from streamer.config import StreamConfig
from streamer.errors import CheckpointError
from streamer.fetch.headers import read_index
from streamer.sources.base import ObjectInfo, Source

__all__ = ["choose", "covers"]


def covers(held: PulledFolder, mode: Mode, layout: Layout | None) -> bool:
    """Whether a folder has what is asked for.

    Args:
        layout: only these ranks' bytes of the weights; None for all.
    """
    if held.mode not in ("all", mode):
        return False
    return mode == "metadata" or held.partial is None or (layout is not None and held.partial.covers(layout))


async def choose(source: Source, config: StreamConfig, items: Sequence[ObjectInfo], mode: Mode) -> list[ObjectInfo]:
    """Return the objects of `mode`, small ones first: what is not weights, then those weights that a load would take.

    Weights alone come with the index and the manifest, which say what they are.

    Raises:
        CheckpointError: there are none, or their keys cannot all be files below one folder.
        SourceError: see `streamer.errors`.
    """
    ours = [item for item in items if item.key != PINS_FILE]  # of whoever fetched into what is fetched from
    by_key = {item.key: item for item in ours}
    listing = [Listed(item.key, item.size) for item in ours]
    is_index_needed = mode != "metadata" or has_weights_beside(listing)
    index = await read_index(source, config, by_key, listing) if is_index_needed else None
    along = accompanying(listing, index)
    chosen = [item for item in ours if item.key in along]
    if mode != "metadata":
        weights = select_files(source.url, listing, index).weights
        if mode == "weights":
            about = {MANIFEST_KEY, index.key if index is not None else MANIFEST_KEY}
            chosen = [item for item in chosen if item.key in about]
        chosen += [by_key[listed.key] for listed in weights]
    if not chosen:
        raise CheckpointError(
            f"{source.url} has nothing but weights, and mode=metadata leaves these out",
            hint="check the URL, or fetch with --mode all",
        )
    for item in ours:
        # Hidden folders are left out, but nobody hides by accident in these.
        if {".", ".."} & set(item.key.split("/")):
            refuse_escape(source, item.key)
    _refuse_clashes(source, {item.key for item in chosen})
    return chosen


def _refuse_clashes(source: Source, keys: Set[str]) -> None:
    for key in sorted(keys):
        refuse_escape(source, key)
        parts = key.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in keys:
                raise CheckpointError(
                    f"{source.url} holds both {'/'.join(parts[:depth])!r} and {key!r}, a file and a folder of one name",
                    hint="remove or rename one of them",
                )
