"""``s3stream verify``: a manifest, and everything held against it. Needs no torch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console

from streamer.artifacts.copied import Comparison, compare_copy, read_manifest
from streamer.artifacts.digests import BLOCK_BYTES, differences, make_manifest
from streamer.checkpoint.manifest import MANIFEST_KEY, Manifest
from streamer.cli.output import Output, size_text
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, ConfigError
from streamer.report import FileChecksum
from streamer.sources import open_source
from streamer.sources.checksummed import ChecksummedSource
from streamer.sources.partial import partial_of
from streamer.sources.write import write_object

__all__ = ["run_verify", "run_verify_copy"]


def run_verify(url: str, config: StreamConfig, output: Output, *, write: bool, target: Path | None) -> bool:
    """Read the whole checkpoint; write its manifest, or compare it with the one it has. Return whether it is right."""
    if write and target is not None:
        raise ConfigError("--write and --output contradict each other; give one")
    expected, found, checksums = asyncio.run(_read(url, config, output, compare=not write and target is None))
    problems = differences(expected, found) if expected is not None else []
    if write:
        write_object(url, MANIFEST_KEY, found.to_json(), config)
    elif target is not None:
        target.write_bytes(found.to_json())
    tensors = [stretch for file in found.files.values() for stretch in file.stretches if stretch.name]
    document = {
        "ok": not problems,
        "url": url,
        "problems": problems,
        "files": len(found.files),
        "tensors": len(tensors),
        "bytes": sum(file.size for file in found.files.values()),
        "checksums": checksums,
        "written": MANIFEST_KEY if write else None if target is None else str(target),
    }
    output.result(document, lambda console: _show(document, console))
    return not problems


def run_verify_copy(url: str, folder: Path, config: StreamConfig, output: Output) -> bool:
    """Compare a folder on this machine with the checkpoint that it is a copy of. Return whether they are the same."""

    path = folder.expanduser().absolute()

    async def compare() -> Comparison:
        source = open_source(url, config)
        try:
            with output.progress("reading") as progress:
                return await compare_copy(source, path, config, progress=progress)
        finally:
            await source.close()

    found = asyncio.run(compare())
    files = found.found.files
    document = {
        "ok": not found.problems,
        "url": url,
        "folder": str(path),
        "problems": found.problems,
        "files": len(files) + len(found.found.others),
        "tensors": sum(bool(stretch.name) for file in files.values() for stretch in file.stretches),
        "bytes": sum(file.size for file in files.values()),
        "compared_with": "manifest" if found.used_manifest else "bytes",
    }
    output.result(document, lambda console: _show_copy(document, console))
    return not found.problems


async def _read(
    url: str, config: StreamConfig, output: Output, *, compare: bool
) -> tuple[Manifest | None, Manifest, dict[str, Any]]:
    """Return the manifest there is, the manifest of what was read, and what came of each file's stored checksum."""
    # Digests of bytes that differ from what was uploaded would only make the damage official.
    source = ChecksummedSource(open_source(url, config), longest_read_bytes=config.request_bytes, in_order=True)
    try:
        partial = partial_of(source)
        if partial is not None:
            raise CheckpointError(
                f"{source.url} is partial: of the weights, it holds only what {partial} needs",
                hint="verify what it was fetched from, or fetch it with --mode all",
            )
        expected = await read_manifest(source) if compare else None
        if compare and expected is None:
            raise CheckpointError(
                f"{source.url} has no {MANIFEST_KEY} to compare with", hint="make one with --write, or name a copy"
            )
        with output.progress("reading") as progress:
            block_bytes = expected.block_bytes if expected is not None else BLOCK_BYTES
            found = await make_manifest(
                source.inner, config, progress=progress, block_bytes=block_bytes, through=source
            )
        checked = (await source.settle()).files
        return expected, found, {key: _outcome(checked[source.label(key)]) for key in found.files}
    finally:
        await source.close()


def _outcome(file: FileChecksum) -> dict[str, Any]:
    return {"algorithm": file.algorithm, "parts": file.parts, "checked": not file.why, "why": file.why or None}


def _show_copy(document: dict[str, Any], console: Console) -> None:
    text = f"{document['tensors']} tensors, {size_text(document['bytes'])}, {document['files']} files in all"
    if document["ok"]:
        how = "as the manifest says" if document["compared_with"] == "manifest" else "byte for byte as in the source"
        console.print(f"{document['folder']}: {text}: {how}", markup=False)
    for problem in document["problems"]:
        console.print(problem, markup=False)


def _show(document: dict[str, Any], console: Console) -> None:
    text = f"{document['tensors']} tensors in {document['files']} files, {size_text(document['bytes'])}"
    if document["written"]:
        console.print(f"{text}: digests written to {document['written']}", markup=False)
    elif document["ok"]:
        console.print(f"{text}: as the manifest says", markup=False)
    stored = {key: file for key, file in document["checksums"].items() if file["algorithm"]}
    if stored:
        checked = sorted({file["algorithm"] for file in stored.values() if file["checked"]})
        names = f" ({', '.join(checked)})" if checked else ""
        right = sum(file["checked"] for file in stored.values())
        console.print(f"{right} of {document['files']} files are as the store's checksums say{names}", markup=False)
    for key, file in stored.items():
        if not file["checked"]:
            console.print(f"{key} was not held against its stored checksum: {file['why']}", markup=False)
    for problem in document["problems"]:
        console.print(problem, markup=False)
