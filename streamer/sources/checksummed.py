"""A source whose bytes are held against the checksums that the store has kept since the upload."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TypeVar

from streamer.checkpoint.regions import join
from streamer.checkpoint.stored import StoredChecksum
from streamer.errors import (
    BadResponseError,
    CheckpointError,
    IntegrityError,
    MissingDependencyError,
    ObjectChangedError,
    shorten,
)
from streamer.report import Checksums
from streamer.sources.base import ObjectInfo, Source
from streamer.sources.checksum_book import FileBook, Piece, Readings, Region, open_book
from streamer.sources.wrapper import SourceWrapper

__all__ = ["ChecksummedSource"]

T = TypeVar("T")

#: When all but this share of a region was read, the rest is read too, to have it checked. A tensor that the model
#: does not want would otherwise leave its whole file unchecked.
_MOST_MISSING_SHARE = 1 / 16
_RESTS_AT_ONCE = 8
#: Before headers are read, weights are known by their names alone.
_OTHER_NAME = StoredChecksum(None, why_not="its name does not end in .safetensors")
_NOBODY: Mapping[int, Mapping[str, Readings]] = MappingProxyType({})


class ChecksummedSource(SourceWrapper):
    """`source`, with every read of a weights file hashed, in threads beside the event loop.

    What is compared is what was delivered: a checksum is known to be right or wrong only when all that it covers has
    been read, and by then most of it has been handed on. So a mismatch is an error, and what was loaded is no good.

    Args:
        source: closed with this one.
        longest_read_bytes: of the load.
        in_order: each file is read once, from its start to its end, though several reads may be under way. Then
            hashes can be checked as well, and nothing is read for the sake of checking.
        is_shared: other ranks read some of every file. Then only CRCs can be checked, when what all have read is put
            together.
        threads: that hash.
    """

    def __init__(
        self,
        source: Source,
        *,
        longest_read_bytes: int,
        in_order: bool = False,
        is_shared: bool = False,
        threads: int = 2,
    ) -> None:
        super().__init__(source)
        self._longest_read_bytes = longest_read_bytes
        self._longest_hash_bytes = None if in_order else 0 if is_shared else longest_read_bytes
        self._in_order = in_order
        self._books: dict[str, FileBook] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._advanced = asyncio.Condition()
        self._settled: Checksums | None = None
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="s3stream-checksum")

    # -- before: what there is to check ----------------------------------------------------------------

    async def _book(self, item: ObjectInfo) -> FileBook:
        async with self._opening.setdefault(item.key, asyncio.Lock()):
            if item.key not in self._books:
                self._enter(item, await self.stored_checksum(item))
            book = self._books[item.key]
        if book.item != item:
            # A checksum speaks for one of them, and a model made of both is neither.
            first, second = (known.version or known.pin for known in (book.item, item))
            raise ObjectChangedError(
                f"the load reads two versions of the object, {first} and {second}",
                url=self.label(item.key),
                hint="load again when nobody writes to it",
            )
        return book

    def _enter(self, item: ObjectInfo, stored: StoredChecksum) -> None:
        book = open_book(item, stored, longest_read_bytes=self._longest_hash_bytes)
        self._refuse_nonsense(book)
        if self._in_order:
            book.cut_at([])  # nothing overlaps
        self._books[item.key] = book

    def known(self) -> dict[str, StoredChecksum]:
        """Return, by key, what the store has been asked for."""
        return {key: book.stored for key, book in self._books.items()}

    def adopt(self, items: Sequence[ObjectInfo], known: Mapping[str, StoredChecksum]) -> None:
        """Take what another rank asked for about the same `items`, instead of asking again; before anything is read."""
        for item in items:
            self._enter(item, known[item.key])

    def _refuse_nonsense(self, book: FileBook) -> None:
        stored, algorithm = book.stored, book.algorithm
        if algorithm is None:
            return
        digests = [part.digest for part in stored.parts]
        if any(len(digest) != algorithm.nbytes for digest in digests):
            raise BadResponseError(
                f"the store gives a {algorithm.name} of another length", url=self.label(book.item.key)
            )
        if stored.of_parts is not None and algorithm.digest_of(b"".join(digests)) != stored.of_parts:
            raise IntegrityError(
                f"the store's {algorithm.name} of its parts is not that of the parts' own",
                url=self.label(book.item.key),
            )

    def expect(self, tensors: Iterable[tuple[ObjectInfo, int]], items: Sequence[ObjectInfo]) -> None:
        """Say what will be read, after the headers have been.

        Args:
            tensors: the file and start of each.
            items: all files; their headers have been read.

        Raises:
            CheckpointError: no file has a checksum that could be checked.
            MissingDependencyError: likewise, for want of a package.
        """
        starts: dict[str, set[int]] = {item.key: set() for item in items}
        for item, start in tensors:
            starts[item.key].add(start)
        for item in items:
            if item.key not in self._books:
                self._enter(item, _OTHER_NAME)
        without: dict[str, list[FileBook]] = {}
        for key, positions in starts.items():
            book = self._books[key]
            book.cut_at(sorted(positions))
            if book.why_not:
                without.setdefault(book.why_not, []).append(book)
        if sum(map(len, without.values())) == len(starts):
            self._refuse(without)
        for why, books in without.items():
            names = shorten([book.item.key for book in books], 3)
            warnings.warn(
                f"{self.url}: {len(books)} of {len(starts)} files will not be checked ({names}): {why}", stacklevel=2
            )

    def _refuse(self, without: dict[str, list[FileBook]]) -> None:
        for books in without.values():
            if books[0].why_error is not None:
                raise MissingDependencyError(
                    f"integrity=checksums, and {books[0].why_error.message}", hint=books[0].why_error.hint
                )
        reasons = "; ".join(f"{books[0].item.key}: {why}" for why, books in without.items())
        raise CheckpointError(
            f"{self.url}: integrity=checksums, and no file has a checksum that a load could check ({reasons})",
            hint="upload with `aws s3 cp --checksum-algorithm CRC32`, or make a manifest with `s3stream verify URL "
            "--write` and use integrity=manifest",
        )

    # -- meanwhile ---------------------------------------------------------------------------------------

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        if not item.key.endswith(".safetensors") and item.key not in self._books:
            await self._source.read_into(item, start, buffers)
            return
        book = await self._book(item)
        await self._source.read_into(item, start, buffers)
        pieces = book.note(start, buffers)
        if not pieces or book.algorithm is None:
            return
        if book.algorithm.crc is None:
            for piece in pieces:
                await self._carry_on(book, piece)
            return
        crc_of = book.algorithm.crc_of
        crcs = await self._in_thread(lambda: [crc_of(piece.memory) for piece in pieces])
        for piece, crc in zip(pieces, crcs, strict=True):
            known = piece.region.pieces.setdefault((piece.start, piece.end), crc)
            if known != crc:
                raise self._contradiction(book, piece.start, piece.end)
            piece.region.read.add(piece.start, piece.end)
        for region in dict.fromkeys(piece.region for piece in pieces):
            if region.is_read and region.joined is None:
                await self._join(book, region)

    async def _join(self, book: FileBook, region: Region) -> None:
        """Compare the ranges of a region, all of which has been read."""
        assert book.algorithm is not None
        assert book.algorithm.crc is not None
        crc, pieces = book.algorithm.crc, dict(region.pieces)
        region.joined = len(pieces)
        joined = await self._in_thread(lambda: join(pieces, region.part.start, region.part.end, crc))
        region.apart = joined.apart
        if joined.contradiction is not None:
            raise self._contradiction(book, *joined.contradiction)
        if joined.crc is not None:
            self._compare(book, region, joined.crc.to_bytes(book.algorithm.nbytes, "big"))
            region.is_right = True

    async def _carry_on(self, book: FileBook, piece: Piece) -> None:
        """Feed a hash, which takes bytes in order alone."""
        region = piece.region
        if self._in_order:
            async with self._advanced:
                await self._advanced.wait_for(lambda: region.position >= piece.start)
        region.read.add(piece.start, piece.end)
        if region.position != piece.start or region.is_hashing:
            region.apart += piece.end - piece.start
            return
        assert book.algorithm is not None
        running = region.running = region.running or book.algorithm.new_hash()
        region.is_hashing = True
        await self._in_thread(lambda: [running.update(part) for part in piece.memory])
        region.is_hashing = False
        region.position = piece.end
        async with self._advanced:
            self._advanced.notify_all()
        if piece.end == region.part.end:
            self._compare(book, region, running.digest())
            region.is_right = True

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work`, which reads memory that is others' as soon as this ends, however it does."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def _compare(self, book: FileBook, region: Region, found: bytes) -> None:
        if found == region.part.digest:
            return
        assert book.algorithm is not None
        what = f"part {region.number}" if region.number else "the file"
        raise IntegrityError(
            f"{what} has the {book.algorithm.name} {found.hex()}, and the store keeps {region.part.digest.hex()}",
            url=self.label(book.item.key),
            start=region.part.start,
            end=region.part.end,
            hint="load again, for it may have been damaged on its way; if that does not help, upload the file again",
        )

    def _contradiction(self, book: FileBook, start: int, end: int) -> IntegrityError:
        return IntegrityError(
            "it was read more than once, and not with the same bytes",
            url=self.label(book.item.key),
            start=start,
            end=end,
            hint="load again; if that does not help, look for what stands between this machine and the store",
        )

    # -- after: what came of it --------------------------------------------------------------------------

    def readings(self) -> dict[str, Readings]:
        """Return, by key, what was read here, for the one of the ranks that settles for all."""
        return {key: book.readings() for key, book in self._books.items()}

    async def settle(self, others: Mapping[int, Mapping[str, Readings]] = _NOBODY) -> Checksums:
        """Read the little that is missing of some regions, compare what is left, and sum up. Idempotent.

        Args:
            others: what other ranks have read, by their numbers.

        Raises:
            IntegrityError, SourceError: as for a read.
        """
        if self._settled is None:
            for rank, readings in others.items():
                for key, other in readings.items():
                    book = self._books[key]
                    if (different := book.add(rank, other)) is not None:
                        raise self._contradiction(book, *different)
            regions = [
                (book, region)
                for book in self._books.values()
                if book.algorithm is not None and book.algorithm.crc is not None
                for region in book.regions
            ]
            gate = asyncio.Semaphore(_RESTS_AT_ONCE)
            tasks = [asyncio.ensure_future(self._settle(book, region, gate)) for book, region in regions]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self._settled = Checksums.of({self.label(key): book.result() for key, book in sorted(self._books.items())})
        return self._settled

    async def _settle(self, book: FileBook, region: Region, gate: asyncio.Semaphore) -> None:
        async with gate:
            most = min(self._longest_read_bytes, region.nbytes * _MOST_MISSING_SHARE)
            if not self._in_order and region.nbytes - region.read.nbytes <= most:
                for start, end in region.read.missing(region.part.start, region.part.end):
                    await self.read_into(book.item, start, [memoryview(bytearray(end - start))])
            if region.is_read and region.joined != len(region.pieces):
                await self._join(book, region)

    async def close(self) -> None:
        self._threads.shutdown(wait=True)
        await super().close()
