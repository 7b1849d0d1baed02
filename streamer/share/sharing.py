"""`Sharing`: what a load asks of the other ranks that load together with it.

Ranks meet in rounds. In each, all say which bytes they need (nothing, perhaps) and how far they are; then the ranks of
each machine carry out one partition of what is needed there. A rank that fails takes part in the next
round with its error, so that all end with the same one. How many rounds there are need not be agreed:
whoever has nothing left to ask for joins the others' rounds until all are as far as itself.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from streamer.config import StreamConfig
from streamer.errors import LoadError, StreamError
from streamer.fetch.engine import FetchEngine, Filled, Progress, part_of, request_bytes_for, slab_bytes_for
from streamer.fetch.fill import CopyJob, demand_of, lay_out
from streamer.plan.sharing import SharedRead, pack, partition, pieces_of, spans_of, unpack
from streamer.report import Sharing as SharingReport
from streamer.share.group import Group
from streamer.share.node import Node
from streamer.sources.base import ObjectInfo, Source
from streamer.spans import add_span

__all__ = ["SharedFile", "Sharing"]

T = TypeVar("T")

#: How long a rank that failed waits for the others, to tell them.
_FAREWELL_SECONDS = 30.0


class _Stage(IntEnum):
    ASKING = 0
    """There may be more to ask for before the code that waits can go on."""
    WAITING = 1
    """What was asked for must be there before the code can go on."""
    OVER = 2
    """There will be nothing more in this load."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file of the checkpoints that are loaded.

    Attributes:
        origins: where its tensors begin, sorted.
    """

    source: Source
    item: ObjectInfo
    origins: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Message:
    """What a rank says when all meet.

    Attributes:
        purpose: must be the same on all.
        host: identity of its machine.
        files: digest of the files that it numbers.
        spans: that it needs, packed.
        fetched_bytes: since the load began.
        error: why it gives up.
        value: what it has for the others.
    """

    purpose: str
    stage: _Stage
    host: str
    files: bytes = b""
    spans: bytes = b""
    fetched_bytes: int = 0
    error: StreamError | None = None
    value: Any = None


class Sharing:
    """One load's dealings with the other ranks. All of them make one, and use it alike.

    Args:
        group: the ranks that load together.
        fetched_bytes: asks how many this rank has received so far.

    Attributes:
        is_open: whether what is filled now is asked for together with the others.
        has_parted: whether this rank meets the others no more.
    """

    def __init__(self, group: Group, config: StreamConfig, *, fetched_bytes: Callable[[], int]) -> None:
        self._group = group
        self._config = config
        self._fetched_bytes = fetched_bytes
        self._host = group.host
        self._node: Node | None = None
        self._is_placed = False
        self.has_parted = False
        self.is_open = False
        self._engines: list[FetchEngine] = []
        self._files: list[SharedFile] = []
        self._digest = hashlib.sha256()
        self._ranks, self._arena_bytes = 1, 0
        self._for_others = self._by_others = 0
        self._on_this_machine: int | None = None

    def agree(self, purpose: str, read: Callable[[], T]) -> T:
        """Have the first rank `read` something, and return it on all of them.

        Raises:
            StreamError: reading failed, or another rank did.
        """
        found = [read()] if self._group.rank == 0 else []
        self.collect(purpose, None)
        return self._group.broadcast(found[0] if found else None, source=0)

    def collect(self, purpose: str, value: T) -> list[T]:
        """Return every rank's `value`, by rank.

        Raises:
            StreamError: another rank failed, or does something else.
        """
        message = _Message(purpose, _Stage.ASKING, self._host, fetched_bytes=self._fetched_bytes(), value=value)
        return [answer.value for answer in self._meet(message)]

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reads in `agree`."""
        return self._group.rank == 0

    def add(self, engine: FetchEngine, files: Sequence[SharedFile]) -> None:
        """Make `files` known, which are numbered in the order of all calls; `engine` reads the same checkpoint."""
        self._engines.append(engine)
        self._files.extend(files)
        for file in files:
            label = (file.source.label(file.item.key), file.item.size, file.item.pin, file.item.version)
            self._digest.update(repr(label).encode())
        if self._node is not None:
            self._stage(engine)

    # -- rounds --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def window(self, *, is_last: bool = False) -> Iterator[None]:
        """While this is entered, fills are shared; when it is left, every rank's have been carried out.

        Args:
            is_last: nothing will be asked for afterwards, so that all ranks leave it in the same round.
        """
        self.is_open = True
        try:
            yield
            mine = _Stage.OVER if is_last else _Stage.WAITING
            while min(self._round((), mine, None)[0]) < mine:
                pass
        finally:
            self.is_open = False

    def fill(self, jobs: Sequence[CopyJob], progress: Progress | None = None) -> Filled | None:
        """Fill `jobs` together with what the other ranks ask for; see `FetchEngine.fill`.

        Returns:
            None if nothing can be shared; the caller then fills them alone.

        Raises:
            StreamError: this rank failed, or another did.
        """
        return self._round(jobs, _Stage.ASKING, progress)[1]

    def _round(
        self, jobs: Sequence[CopyJob], stage: _Stage, progress: Progress | None
    ) -> tuple[list[_Stage], Filled | None]:
        began = time.perf_counter()
        gap = self._config.coalesce_gap_bytes
        demands = [demand_of(job) for job in jobs]
        spans = pack(spans_of(demands, gap))
        digest = self._digest.digest()
        answers = self._meet(_Message("load", stage, self._host, digest, spans, self._fetched_bytes()))
        here = [rank for rank, answer in enumerate(answers) if answer.host == self._host]
        stages = [answer.stage for answer in answers]
        asked = [rank for rank, answer in enumerate(answers) if answer.spans]
        if not asked:
            return stages, None
        if any(answers[rank].files != digest for rank in asked):
            raise LoadError(
                "the ranks that load together do not read the same files in the same order",
                hint="check that all were started with the same model path and options",
            )
        if not self._is_placed:
            self._place(here)
        node = self._node
        if node is None:
            return stages, None
        reads = partition(
            [unpack(answers[rank].spans) for rank in here],
            {number: file.origins for number, file in enumerate(self._files)},
            request_bytes=self._engines[0].request_bytes,
            coalesce_gap_bytes=gap,
        )
        requests = pieces_of(demands, reads, node.place, gap)
        layout = lay_out(
            jobs,
            requests,
            self._read_from,
            whole={number for number in requests if reads[number].is_shared},
            not_ours={number for number in requests if reads[number].reader != node.place},
        )
        spent = time.perf_counter() - began
        self._engines[0].times.plan += spent
        add_span("plan", time.time_ns() - int(spent * 1e9), time.time_ns(), copies=len(jobs), requests=len(requests))
        for target in layout.targets:
            if target.tensor.device.type == "cuda":
                node.arena.pin_for(target.tensor.device)
                break
        self._engines[0].carry_out(layout, requests, progress, exchange=node.round(reads))
        return stages, self._account(reads, node.place, sum(demand.view.nbytes for demand in demands))

    def _read_from(self, number: int) -> tuple[Source, ObjectInfo]:
        return self._files[number].source, self._files[number].item

    def _account(self, reads: Sequence[SharedRead], place: int, needed_bytes: int) -> Filled:
        own = [read for read in reads if read.reader == place]
        self._for_others += sum(read.nbytes for read in own if read.is_shared)
        self._by_others += sum(read.nbytes for read in reads if read.reader != place and read.has_consumer(place))
        return Filled(needed_bytes, sum(read.nbytes - read.needed_bytes for read in own))

    def _place(self, here: Sequence[int]) -> None:
        """Set up what the ranks of this machine have in common; all ranks of all machines come here at once."""
        self._is_placed = True
        part = part_of(self._config, len(here))
        slot_bytes = slab_bytes_for(part)
        node = Node(here, self._group.rank, self._engines[0].loop)
        try:
            why = node.connect(self.collect, slot_bytes=slot_bytes, slots=part.buffer_bytes // slot_bytes)
        except BaseException:
            node.close()
            raise
        if why or len(here) == 1:
            node.close()
            if why and self._config.share == "require":
                raise LoadError(f"nothing can be shared between ranks, and share=require asks for it: {why}")
            if why and self.is_first:
                warnings.warn(
                    f"every rank reads all that it needs itself, for nothing can be shared: {why}", stacklevel=2
                )
            return
        self._node, self._ranks, self._arena_bytes = node, len(here), len(node.arena.memory)
        for engine in self._engines:
            self._stage(engine)

    def _stage(self, engine: FetchEngine) -> None:
        assert self._node is not None
        engine.stage_in(self._node.pool, request_bytes_for(part_of(self._config, len(self._node.ranks))))

    def _meet(self, message: _Message) -> list[_Message]:
        """Exchange messages with all ranks.

        Raises:
            LoadError: a rank is late, gone, or somewhere else in its load.
            StreamError: another rank's.
        """
        try:
            answers = self._group.gather(message, timeout_seconds=self._config.share_timeout_seconds)
        except LoadError:
            self.has_parted = True  # it will not work the next time either
            raise
        error = _first_error(answers)
        if error is not None:
            self.has_parted = True
            raise error
        purposes = {answer.purpose for answer in answers}
        if len(purposes) > 1:
            self.has_parted = True
            raise LoadError(
                f"the ranks that load together do different things: {', '.join(sorted(purposes))}",
                hint="check that all were started with the same model path and options",
            )
        self._on_this_machine = sum(answer.fetched_bytes for answer in answers if answer.host == self._host)
        return answers

    # -- afterwards ----------------------------------------------------------------------------------------

    def part(self) -> None:
        """Meet the others no more; all do so after the same meeting."""
        self.has_parted = True

    def fail(self, error: BaseException) -> StreamError | None:
        """Tell the others that this rank gives up, unless all have finished or know already.

        Returns:
            What to raise instead, when several ranks failed at once: all raise the same.
        """
        if self.has_parted:
            return None
        self.has_parted = True
        said = _with_rank(error, self._group.rank)
        if self._node is not None:
            self._node.give_up(said)
        # One that is gone, or stuck, is an error of its own, of which the others hear in the same way.
        try:
            timeout = min(_FAREWELL_SECONDS, self._config.share_timeout_seconds)
            message = _Message("failure", _Stage.OVER, self._host, error=said)
            chosen = _first_error(self._group.gather(message, timeout_seconds=timeout))
        except LoadError:
            return None
        return chosen if chosen is not None and chosen.rank != said.rank and isinstance(error, Exception) else None

    def report(self) -> SharingReport:
        """Sum up, after the last window."""
        return SharingReport(
            ranks=self._ranks,
            arena_bytes=self._arena_bytes,
            read_for_others_bytes=self._for_others,
            read_by_others_bytes=self._by_others,
            node_fetched_bytes=self._on_this_machine,
        )

    def close(self) -> None:
        """Let go of what the ranks have in common. Idempotent."""
        node, self._node = self._node, None
        if node is not None:
            node.close()


def _first_error(answers: Sequence[_Message]) -> StreamError | None:
    """Return the lowest rank's own error; others may only pass on what they heard from it."""
    errors = [(answer.error, rank) for rank, answer in enumerate(answers) if answer.error is not None]
    own = (error for error, rank in errors if error.rank == rank)
    return next(own, errors[0][0] if errors else None)


def _with_rank(error: BaseException, rank: int) -> StreamError:
    """Return what other ranks shall raise."""
    if not isinstance(error, StreamError):
        return _with_rank(LoadError(f"{type(error).__name__}: {error}", hint="see the log of that rank"), rank)
    if error.rank is not None:
        return error
    said = copy.copy(error)
    said.__cause__ = said.__context__ = said.__traceback__ = None
    said.rank = rank
    said.message = f"on rank {rank}, {error.message}"
    return said
