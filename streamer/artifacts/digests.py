"""Makes a checkpoint's manifest, or holds the checkpoint against the one it has, by reading all of it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from streamer.checkpoint.checkpoint import Checkpoint
from streamer.checkpoint.manifest import HEADER, MANIFEST_KEY, FileDigests, Manifest, Stretch, block_digest
from streamer.config import StreamConfig
from streamer.fetch.headers import read_checkpoint
from streamer.sources.base import ObjectInfo, Source

__all__ = ["BLOCK_BYTES", "differences", "digest_others", "make_manifest"]

#: A read is widened by less than two blocks, and the digests of a terabyte take sixteen megabytes.
BLOCK_BYTES = 1 << 20
_READ_BYTES = 16 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Whole blocks of one stretch that one request reads."""

    item: ObjectInfo
    start: int
    end: int


async def make_manifest(
    source: Source,
    config: StreamConfig,
    *,
    progress: Progress | None = None,
    block_bytes: int = BLOCK_BYTES,
    through: Source | None = None,
) -> Manifest:
    """Read everything and return its digests.

    Args:
        through: instead of `source`, what files are read through, each byte once. Reads begin in order.
        progress: called with bytes read and bytes to read.

    Raises:
        CheckpointError, SourceError: see `streamer.errors`.
    """
    opened = await read_checkpoint(source, config)
    pieces_by_file = [
        list(_pieces(item, list(_stretches(opened.checkpoint, number)), config.request_bytes, block_bytes))
        for number, item in enumerate(opened.items)
    ]
    digests = await _digest_all(through or source, pieces_by_file, config, progress, block_bytes)
    files = {}
    for number, (item, pieces) in enumerate(zip(opened.items, pieces_by_file, strict=True)):
        by_start = {piece.start: digests[number][index] for index, piece in enumerate(pieces)}
        stretches = []
        for name, start, end in _stretches(opened.checkpoint, number):
            joined = b"".join(by_start[piece.start] for piece in pieces if start <= piece.start < end)
            stretches.append(Stretch(name, start, end, joined))
        files[item.key] = FileDigests(item.size, item.pin, tuple(stretches), item.version)
    others = [listed.key for listed in opened.checkpoint.metadata_files]
    return Manifest(block_bytes, files, await digest_others(source, others))


def _stretches(checkpoint: Checkpoint, file: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of the header and of every tensor that has bytes."""
    yield HEADER, 0, checkpoint.files[file].header_bytes
    for info in sorted(
        (info for info in checkpoint.tensors.values() if info.file == file and info.nbytes), key=lambda info: info.start
    ):
        yield info.name, info.start, info.end


def _pieces(
    item: ObjectInfo, stretches: Sequence[tuple[str, int, int]], request_bytes: int, block_bytes: int
) -> Iterator[_Piece]:
    step = max(request_bytes // block_bytes, 1) * block_bytes
    for _, start, end in stretches:
        for position in range(start, end, step):
            yield _Piece(item, position, min(position + step, end))


async def _digest_all(
    source: Source,
    pieces_by_file: Sequence[Sequence[_Piece]],
    config: StreamConfig,
    progress: Progress | None,
    block_bytes: int,
) -> list[list[bytes]]:
    gate = asyncio.Semaphore(max(1, min(config.concurrency, config.buffer_bytes // config.request_bytes)))
    total = sum(piece.end - piece.start for pieces in pieces_by_file for piece in pieces)
    done = 0
    loop = asyncio.get_running_loop()

    async def digest(piece: _Piece) -> bytes:
        nonlocal done
        async with gate:
            body = bytearray(piece.end - piece.start)
            await source.read_into(piece.item, piece.start, [memoryview(body)])
            found = await loop.run_in_executor(threads, _digest_blocks, body, block_bytes)
        done += len(body)
        if progress is not None:
            progress(done, total)
        return found

    with ThreadPoolExecutor(2, thread_name_prefix="s3stream-digest") as threads:
        tasks = [[asyncio.ensure_future(digest(piece)) for piece in pieces] for pieces in pieces_by_file]
        try:
            return [list(await asyncio.gather(*of_file)) for of_file in tasks]
        finally:
            left = [task for of_file in tasks for task in of_file]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


def _digest_blocks(body: bytearray, block_bytes: int) -> bytes:
    view = memoryview(body)
    return b"".join(block_digest([view[start : start + block_bytes]]) for start in range(0, len(body), block_bytes))


async def digest_others(source: Source, keys: Iterable[str]) -> dict[str, str]:
    """Read the objects with these keys, which are not weights, and return their SHA-256 in hex; no manifest's.

    Raises:
        SourceError: see `streamer.errors`.
    """
    others = {}
    for key in keys:
        if key != MANIFEST_KEY:
            item, digest = await source.stat(key), hashlib.sha256()
            body = memoryview(bytearray(min(_READ_BYTES, item.size)))
            for start in range(0, item.size, _READ_BYTES):
                piece = body[: min(_READ_BYTES, item.size - start)]
                await source.read_into(item, start, [piece])
                digest.update(piece)
            others[key] = digest.hexdigest()
    return others


def differences(expected: Manifest, found: Manifest) -> list[str]:
    """Say, one sentence each, where `found` is not what `expected` says; both have blocks of equal length."""
    problems = [f"{key} is missing" for key in expected.files if key not in found.files]
    problems += [f"{key} is not in the manifest" for key in found.files if key not in expected.files]
    for key, file in expected.files.items():
        if key not in found.files:
            continue
        now = {stretch.name: stretch for stretch in found.files[key].stretches}
        for stretch in file.stretches:
            what = f"tensor {stretch.name}" if stretch.name else "the header"
            other = now.get(stretch.name)
            if other is None:
                problems.append(f"{key}: {what} is missing")
            elif (other.end - other.start, other.digests) != (stretch.end - stretch.start, stretch.digests):
                problems.append(f"{key}: {what} has other bytes")
        names = {stretch.name for stretch in file.stretches}
        problems += [f"{key}: tensor {name} is not in the manifest" for name in now if name not in names]
    for key, digest in expected.others.items():
        if key not in found.others:
            problems.append(f"{key} is missing")
        elif found.others[key] != digest:
            problems.append(f"{key} has other content")
    return problems
