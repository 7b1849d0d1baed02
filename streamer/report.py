"""What a load did: name sets, bytes, requests, times."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "Cast",
    "Checksums",
    "FileChecksum",
    "ForcedRead",
    "LoadReport",
    "LoadTimes",
    "PlanCacheUse",
    "Sharing",
    "Verified",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a verification compared.

    Attributes:
        copies: of which samples were compared.
        nbytes: compared, in the parameters.
        replaced: copies whose destination is not part of the model any more, such as before quantisation.
        overwritten: copies into bytes that the model's code wrote to afterwards.
        skipped: computed copies that are too large to compute twice.
    """

    copies: int
    nbytes: int
    replaced: int
    overwritten: int
    skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChecksum:
    """What came of one file's stored checksum.

    Attributes:
        algorithm: as S3 writes it; None when the store keeps none.
        parts: that have a checksum of their own; 1 when it is of the whole file, 0 when there is none to check.
        checked_parts: of which every byte was read, and was right.
        checked_bytes: in those.
        unchecked_bytes: read besides, which no checksum could be compared with.
        why: not the whole file; empty when it was checked.
    """

    algorithm: str | None
    parts: int
    checked_parts: int
    checked_bytes: int
    unchecked_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """What was held against the checksums that the store keeps; anything wrong is an error instead.

    Attributes:
        files: by URL.
        checked_files: those of which every byte was.
        checked_bytes, unchecked_bytes: sums over all files.
    """

    files: Mapping[str, FileChecksum]
    checked_files: int
    checked_bytes: int
    unchecked_bytes: int

    @classmethod
    def of(cls, files: Mapping[str, FileChecksum]) -> Checksums:
        """Sum up."""
        return cls(
            files=files,
            checked_files=sum(not file.why for file in files.values()),
            checked_bytes=sum(file.checked_bytes for file in files.values()),
            unchecked_bytes=sum(file.unchecked_bytes for file in files.values()),
        )


@dataclass(frozen=True, slots=True)
class Cast:
    """Copies that converted `source` dtype to `destination` dtype, and how many there were."""

    source: str
    destination: str
    count: int


@dataclass(frozen=True, slots=True)
class ForcedRead:
    """Source bytes that could not wait for the plan, and the operation that needed their values."""

    operation: str
    tensors: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlanCacheUse:
    """What the plan cache did for a load.

    Attributes:
        outcome: ``used``: the model's loading code did not run. ``kept``: it ran, and need not next time. ``not used``:
            it ran, and will have to again.
        why: it has to.
    """

    outcome: Literal["used", "kept", "not used"]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What a rank had from loading together with others.

    Attributes:
        ranks: that shared, on this machine; 1 when it could not be done.
        arena_bytes: of shared memory, for all of them together.
        read_for_others_bytes: reads that this rank made and others took some of.
        read_by_others_bytes: reads that others made and this rank took some of.
        node_fetched_bytes: received by all ranks of this machine, repeated bytes and headers included.
    """

    ranks: int
    arena_bytes: int
    read_for_others_bytes: int
    read_by_others_bytes: int
    node_fetched_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """Seconds.

    Attributes:
        headers: listing, index and headers.
        trace: in the model's own loading code, waiting for bytes not counted.
        plan: computing which reads to make.
        first_byte: from the start until the first weight bytes were there; None when none were needed.
        fetch: waiting for bytes.
        copy: copying staged bytes; received in place, they need no copy.
        total: all of it.
    """

    headers: float
    trace: float
    plan: float
    first_byte: float | None
    fetch: float
    copy: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The outcome of one load, on one rank.

    Attributes:
        url: the checkpoint.
        mode: ``trace`` or ``eager``.
        expected: the model's parameters (for a plain module, all its state-dict entries).
        loaded: those of them that got values.
        ignored: checkpoint tensors the model took no bytes from, with the reason. Not known in eager mode.
        unexpected: checkpoint tensors that a plain module has no place for.
        unindexed: tensors that the files hold but the index does not name.
        checkpoint_bytes: all tensors.
        needed_bytes: what this rank's copies asked for; all tensors in eager mode.
        fetched_bytes: what this rank received for them, over-read and repeated bytes included.
        over_read_bytes: gaps and covering rows read on purpose.
        header_bytes: received for listing-time reads.
        requests: ranged reads, headers and retries included.
        copies: out of lazy tensors into parameters; 0 in eager mode.
        throttled: answers that asked for fewer requests.
        hedges: reads that were asked for a second time because they took long.
        resumed_bytes: delivered by tries that failed later, and not fetched again.
        peak_buffer_bytes: of staging memory; in eager mode the budget bounds what is fetched ahead.
        verified: what was read again and compared, when `verify` is on.
        sharing: with other ranks; None for a rank that loads on its own.
        checksums: what was held against stored checksums, with ``integrity=checksums``; of all ranks that load
            together, if there is `sharing`.
    """

    url: str
    mode: str
    expected: tuple[str, ...]
    loaded: tuple[str, ...]
    ignored: Mapping[str, str]
    unexpected: tuple[str, ...]
    unindexed: tuple[str, ...]
    checkpoint_bytes: int
    needed_bytes: int
    fetched_bytes: int
    over_read_bytes: int
    header_bytes: int
    requests: int
    retries: int
    throttled: int
    hedges: int
    resumed_bytes: int
    copies: int
    casts: tuple[Cast, ...]
    materialised: tuple[ForcedRead, ...]
    peak_buffer_bytes: int
    verified: Verified | None
    sharing: Sharing | None
    checksums: Checksums | None
    plan_cache: PlanCacheUse | None
    times: LoadTimes

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return dataclasses.asdict(self)

    def summary(self) -> str:
        """One line, in the style of the engines' own."""
        parts = [
            f"Loading weights took {self.times.total:.2f} seconds",
            f"{_size(self.fetched_bytes)} of {_size(self.checkpoint_bytes)} fetched in {self.requests} requests",
        ]
        if self.retries:
            parts.append(f"{self.retries} retries")
        if self.ignored or self.unexpected:
            parts.append(f"{len(self.ignored) + len(self.unexpected)} tensors not used")
        if self.checksums is not None:
            known = self.checksums
            parts.append(f"stored checksums of {known.checked_files} of {len(known.files)} files checked")
            parts.append(f"{_size(known.unchecked_bytes)} read unchecked")
        if self.plan_cache is not None:
            use = self.plan_cache
            parts.append(f"plan {use.outcome}: {use.why}" if use.why else f"plan {use.outcome}")
        slowest = max(("fetch", self.times.fetch), ("copy", self.times.copy), ("trace", self.times.trace), key=_second)
        parts.append(f"most of it in {slowest[0]}")
        return ", ".join(parts)


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:.2f} MB"
