"""Whether a folder holds all that a fetch said: for probes, so without the network."""

from __future__ import annotations

import stat
from pathlib import Path

from streamer.artifacts.choice import covers
from streamer.artifacts.metadata import PINS_FILE, Mode, PulledFolder, read_marker
from streamer.checkpoint.partial import WORK_FOLDER, Layout
from streamer.errors import ConfigError

__all__ = ["check"]


def check(
    folder: Path, *, url: str | None = None, mode: Mode | None = None, layout: Layout | None = None
) -> tuple[PulledFolder | None, list[str]]:
    """Return what `folder` was filled from, and what is wrong, one sentence each.

    Args:
        url: the source it must have been filled from, as `Source.url` has it; None for any.
        mode: what it must hold at least.
        layout: the ranks whose weights are enough. Without one, a folder that was fetched for some ranks is not what
            another mode than metadata asks for.
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
    if mode is not None and not covers(marker, mode, layout):
        held = f" for {marker.partial}" if marker.partial is not None else ""
        wanted = f" for {layout}" if layout is not None else " whole" if held else ""
        problems.append(f"{folder} was fetched with mode={marker.mode}{held}, not {mode}{wanted}")
    sizes = {item.key: item.size for item in marker.items}
    here = list(marker.here)
    for file in marker.partial.files.values() if marker.partial is not None else ():
        here.append(f"{WORK_FOLDER}/{file.name}")
        sizes[here[-1]] = file.size
    for key in here:
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
