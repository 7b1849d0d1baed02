"""``s3stream fetch``: what an init container runs, and what its probes ask. Needs no torch, but to fetch for ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console

from streamer.artifacts.check import check
from streamer.artifacts.fetch import Fetched, fetch
from streamer.artifacts.metadata import Mode
from streamer.artifacts.ranks import RankSpans
from streamer.checkpoint.partial import Layout, Partial
from streamer.cli.output import Output, size_text
from streamer.config import StreamConfig
from streamer.errors import ConfigError, MissingDependencyError
from streamer.sources.open import local_path
from streamer.sources.s3_url import parse_s3_url

__all__ = ["parse_layout", "parse_mode", "run_check", "run_fetch"]

#: So that a ClusterStorageContainer of KServe can claim a scheme that no other does.
_OWN_SCHEME = "s3stream://"


def parse_mode(text: str | None) -> Mode | None:
    """Read a ``--mode``.

    Raises:
        ConfigError: there is no such mode.
    """
    if text is not None and text not in get_args(Mode):
        raise ConfigError(f"there is no mode {text!r}", hint=f"one of {', '.join(get_args(Mode))}")
    return cast("Mode | None", text)


def parse_layout(
    ranks: Sequence[int], engine: str, tensor: int, pipeline: int, experts: bool, mode: Mode | None
) -> Layout | None:
    """Read ``--rank`` and the options beside it; None without it.

    Raises:
        ConfigError: there is no such rank, or the options contradict each other.
    """
    if not ranks:
        if (tensor, pipeline, experts) != (1, 1, False):
            raise ConfigError("--tp, --pp and --ep are for --rank", hint="say which ranks load from the folder")
        return None
    if mode not in ("weights", "all"):
        raise ConfigError("--rank is for fetching weights", hint="add --mode weights or --mode all")
    count = tensor * pipeline
    if max(ranks) >= count:
        raise ConfigError(f"there is no rank {max(ranks)} among {count}", hint=f"ranks are 0 to {count - 1}")
    return Layout(engine, tensor, pipeline, experts, tuple(sorted(set(ranks))))


def _rank_spans(url: str, layout: Layout, config: StreamConfig, output: Output) -> RankSpans:
    try:
        from streamer.cli.traced import trace_ranks
    except ImportError as error:
        raise MissingDependencyError(
            f"fetching for ranks traces an engine's loading code, which needs the package {error.name}",
            hint="pip install 's3stream[torch]', or fetch without --rank",
        ) from error
    return trace_ranks(url, layout, config, output)


def run_fetch(
    arguments: Sequence[str],
    config: StreamConfig,
    output: Output,
    *,
    mode: Mode | None,
    max_bytes: int | None,
    layout: Layout | None = None,
) -> None:
    """Fill one folder after the other, and print what that came to.

    Args:
        layout: ranks, for which alone weights are fetched.
    """
    found = []
    for url, folder in _pairs(arguments):
        ranks = _rank_spans(url, layout, config, output) if layout is not None else None
        with output.progress(f"fetching {url}", of_bytes=True) as progress:
            fetched = fetch(
                url,
                folder,
                config,
                mode=mode or "metadata",
                ranks=ranks,
                max_bytes=max_bytes,
                progress=progress,
                note=output.note,
            )
        found.append(fetched)
    sources = [_document(fetched) for fetched in found]
    totals = {
        key: sum(source[key] for source in sources)
        for key in ("files", "bytes", "skipped", "resumed_bytes", "fetched_bytes")
    }
    output.result({**totals, "sources": sources}, lambda console: _show(found, console))


def _document(fetched: Fetched) -> dict[str, Any]:
    checksums = fetched.checksums
    return {
        "url": fetched.url,
        "folder": str(fetched.folder),
        "mode": fetched.mode,
        "files": fetched.files,
        "bytes": fetched.nbytes,
        "skipped": fetched.skipped,
        "resumed_bytes": fetched.resumed_bytes,
        "fetched_bytes": fetched.fetched_bytes,
        "removed": list(fetched.removed),
        "partial": _partial_document(fetched.partial),
        "checksums": None
        if checksums is None
        else {key: dataclasses.asdict(file) for key, file in checksums.files.items()},
    }


def _partial_document(partial: Partial | None) -> dict[str, Any] | None:
    if partial is None:
        return None
    layouts = [
        {"engine": one.engine, "tp": one.tensor, "pp": one.pipeline, "ep": one.experts, "ranks": list(one.ranks)}
        for one in partial.layouts
    ]
    return {"layouts": layouts, "files": {key: file.nbytes for key, file in partial.files.items()}}


def _show(found: Sequence[Fetched], console: Console) -> None:
    for fetched in found:
        text = f"{fetched.folder}: {fetched.files} files, {size_text(fetched.nbytes)}, mode={fetched.mode}"
        if fetched.fetched_bytes or fetched.resumed_bytes:
            text += f"; fetched {size_text(fetched.fetched_bytes)}"
        if fetched.resumed_bytes:
            text += f", gone on after {size_text(fetched.resumed_bytes)}"
        if fetched.skipped:
            text += f"; {fetched.skipped} files were there already"
        console.print(text, markup=False)
        if fetched.partial is not None:
            console.print(f"  partial: of the weights, only what {fetched.partial} needs", markup=False)
        if fetched.removed:
            console.print(f"  removed {len(fetched.removed)} files of an older version", markup=False)


def _pairs(arguments: Sequence[str]) -> list[tuple[str, Path]]:
    """Split ``SRC DEST [SRC DEST ...]``.

    Raises:
        ConfigError: a folder is missing, is given twice, or is a URL.
    """
    if not arguments or len(arguments) % 2:
        raise ConfigError(
            f"fetch takes sources and folders in pairs, and got {len(arguments)} arguments",
            hint="write s3stream fetch SRC DEST [SRC DEST ...]",
        )
    pairs = []
    for url, folder in zip(arguments[::2], arguments[1::2], strict=True):
        if "://" in folder:
            raise ConfigError(f"{folder} is no folder on this machine", hint="write the source first: SRC DEST")
        if not folder:
            raise ConfigError("the folder to fetch into is empty", hint="write s3stream fetch SRC DEST")
        pairs.append((_source(url), Path(folder).expanduser().absolute()))
    real = [os.path.realpath(folder) for _, folder in pairs]
    for number, path in enumerate(real):
        if path in real[:number]:
            raise ConfigError(f"{path} is given for two sources", hint="give each a folder of its own")
    return pairs


def _source(url: str) -> str:
    return f"s3://{url.removeprefix(_OWN_SCHEME)}" if url.startswith(_OWN_SCHEME) else url


def run_check(arguments: Sequence[str], output: Output, *, mode: Mode | None, layout: Layout | None = None) -> bool:
    """Print whether folders are complete, without the network; return it.

    Args:
        arguments: one folder, or pairs as for a fetch; then the folders must have been fetched from these sources.
    """
    wanted: list[tuple[str | None, Path]]
    if len(arguments) == 1:
        wanted = [(None, Path(arguments[0]))]
    else:
        wanted = [(_name_of(url), folder) for url, folder in _pairs(arguments)]
    checked = [check(folder, url=url, mode=mode, layout=layout) for url, folder in wanted]
    problems = [problem for _, found in checked for problem in found]
    markers = [marker for marker, _ in checked if marker is not None]
    document = {
        "complete": not problems,
        "problems": problems,
        "files": sum(marker.files for marker in markers),
        "bytes": sum(marker.nbytes for marker in markers),
        "partial": [str(marker.partial) for marker in markers if marker.partial is not None],
    }
    output.result(document, lambda console: _show_check(document, console))
    return not problems


def _name_of(url: str) -> str:
    """Return how a source of `url` names itself, without opening it."""
    path = local_path(url)
    if path is not None:
        return f"file://{path}"
    return parse_s3_url(url).url if url.startswith("s3://") else url


def _show_check(document: dict[str, Any], console: Console) -> None:
    for problem in document["problems"]:
        console.print(problem, markup=False)
    if document["complete"]:
        console.print(f"complete: {document['files']} files, {size_text(document['bytes'])}")
        for text in document["partial"]:
            console.print(f"partial: of the weights, only what {text} needs", markup=False)
