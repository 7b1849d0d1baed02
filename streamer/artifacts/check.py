"""Whether a folder holds all that a fetch said: for probes, so without the network."""

from __future__ import annotations

import stat
from pathlib import Path

from streamer.artifacts.choice import covers
from streamer.artifacts.metadata import PINS_FILE, Mode, PulledFolder, read_marker
from streamer.errors import ConfigError

__all__ = ["check"]


def check(folder: Path, *, url: str | None = None, mode: Mode | None = None) -> tuple[PulledFolder | None, list[str]]:
    """Return what `folder` was filled from, and what is wrong, one sentence each.

    Args:
        url: the source it must have been filled from, as `Source.url` has it; None for any.
        mode: what it must hold at least.
    """
    folder = folder.expanduser().absolute()
    try:
        marker = read_marker(folder)
    except ConfigError as error:
        return None, [error.message]
    if marker is None:
        return None, [f"{folder} has no {PINS_FILE}: nothing was fetched into it, or not all"]
    problems = []
    if url is not None and marker.url != url:
        problems.append(f"{folder} was fetched from {marker.url}, not from {url}")
    if mode is not None and not covers(marker.mode, mode):
        problems.append(f"{folder} was fetched with mode={marker.mode}, not {mode}")
    sizes = {item.key: item.size for item in marker.items}
    for key in marker.here:
        try:
            status = (folder / key).lstat()
        except OSError as error:
            problems.append(f"{folder / key}: {error.strerror}")
            continue
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{folder / key} is no file")
        elif status.st_size != sizes[key]:
            problems.append(f"{folder / key} has {status.st_size} bytes, not {sizes[key]}")
    return marker, problems
