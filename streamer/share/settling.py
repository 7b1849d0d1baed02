"""Stored checksums, when ranks share: none of them sees a whole file, but together they have read all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamer.fetch.engine import FetchEngine
from streamer.report import Checksums, FileChecksum
from streamer.share.sharing import Sharing
from streamer.sources.checksum_book import Readings

__all__ = ["settle_checksums"]


def settle_checksums(engines: Sequence[FetchEngine], sharing: Sharing | None) -> Checksums | None:
    """Hold what was read against what the store keeps, when all has been; None unless ``integrity=checksums``.

    The first rank does it for all, with the CRCs of what each has read, on whatever machine: all read the same pinned
    objects. A collective, if there is sharing.

    Raises:
        IntegrityError: the bytes that arrived, on any rank, are not those that the store was given.
        SourceError, LoadError: see `streamer.errors`.
    """
    if not engines or engines[0].config.integrity != "checksums":
        return None
    if sharing is None or sharing.has_parted:
        return _settle(engines, [])
    readings = sharing.collect("exchange checksums", [engine.readings() for engine in engines])
    return sharing.agree("compare checksums", lambda: _settle(engines, readings[1:]))


def _settle(engines: Sequence[FetchEngine], others: Sequence[Sequence[Mapping[str, Readings]]]) -> Checksums:
    """Do it for all.

    Args:
        others: what each other rank, from 1 on, has read of each checkpoint.
    """
    files: dict[str, FileChecksum] = {}
    for number, engine in enumerate(engines):
        found = engine.settle_checksums({rank: of_rank[number] for rank, of_rank in enumerate(others, 1)})
        assert found is not None
        files |= found.files
    return Checksums.of(files)
