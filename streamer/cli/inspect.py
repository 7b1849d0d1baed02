"""``s3stream inspect``. Needs no torch."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.console import Console
from rich.table import Table

from streamer.checkpoint.checkpoint import Checkpoint
from streamer.checkpoint.partial import Partial
from streamer.cli.output import Output, size_text
from streamer.config import StreamConfig
from streamer.fetch.headers import read_checkpoint
from streamer.sources import open_source, split_file
from streamer.sources.partial import partial_of

__all__ = ["run_inspect"]


def run_inspect(url: str, config: StreamConfig, output: Output) -> None:
    """Print what the checkpoint at `url` holds."""

    async def read() -> tuple[Checkpoint, Partial | None]:
        root, only = split_file(url)
        source = open_source(root, config)
        try:
            with output.progress("reading headers") as progress:
                opened = await read_checkpoint(source, config, only=[only] if only else [], progress=progress)
                return opened.checkpoint, partial_of(source)
        finally:
            await source.close()

    checkpoint, partial = asyncio.run(read())
    output.result(_document(checkpoint, partial), lambda console: _show(checkpoint, partial, console))


def _document(checkpoint: Checkpoint, partial: Partial | None) -> dict[str, Any]:
    return {
        "url": checkpoint.url,
        "files": [
            {"key": file.key, "size": file.size, "tensors": file.tensor_count, "header_bytes": file.header_bytes}
            for file in checkpoint.files
        ],
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.nbytes,
        "dtypes": checkpoint.bytes_by_dtype(),
        "skipped": [{"key": item.key, "size": item.size, "reason": item.reason} for item in checkpoint.skipped],
        "metadata_files": [{"key": item.key, "size": item.size} for item in checkpoint.metadata_files],
        "unindexed": list(checkpoint.unindexed),
        "partial": None if partial is None else str(partial),
    }


def _show(checkpoint: Checkpoint, partial: Partial | None, console: Console) -> None:
    dtypes = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in checkpoint.bytes_by_dtype().items())
    console.print(checkpoint.url, markup=False)
    if partial is not None:
        console.print(f"partial: of the weights, it holds only what {partial} needs", markup=False)
    console.print(f"{len(checkpoint.tensors)} tensors, {size_text(checkpoint.nbytes)} ({dtypes})", markup=False)
    table = Table("file", "size", "tensors", box=None)
    for file in checkpoint.files:
        table.add_row(file.key, size_text(file.size), str(file.tensor_count))
    console.print(table)
    if checkpoint.skipped:
        console.print("\nskipped")
        table = Table("object", "size", "reason", box=None)
        for item in checkpoint.skipped:
            table.add_row(item.key, size_text(item.size), item.reason)
        console.print(table)
    if checkpoint.unindexed:
        console.print(f"\nnot named by the index, but loaded: {', '.join(checkpoint.unindexed)}", markup=False)
