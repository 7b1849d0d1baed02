"""`Sharing`: what a load asks of the other ranks that load together with it.

Ranks meet in rounds. In each, all say which bytes they need (nothing, perhaps) and how far they are; then the ranks of
each machine carry out one partition of what is needed there. A rank that fails takes part in the next
round with its error, so that all end with the same one. How many rounds there are need not be agreed:
whoever has nothing left to ask for joins the others' rounds until all are as far as itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from streamer.config import StreamConfig
from streamer.errors import LoadError, StreamError
from streamer.fetch.engine import (
    FetchEngine,
    Filled,
    FillTimes,
    Progress,
    part_of,
    request_bytes_for,
    slab_bytes_for,
)
from streamer.fetch.fill import CopyJob, demand_of, lay_out
from streamer.fetch.flight import Flight
from streamer.plan.sharing import SharedRead, pack, partition, pieces_of, spans_of, unpack
from streamer.report import Sharing as SharingReport
from streamer.share.group import Group
from streamer.share.messages import Message, Stage, first_error, with_rank
from streamer.share.node import Node
from streamer.sources.base import ObjectInfo, Source
from streamer.spans import add_span

__all__ = ["SharedFile", "Sharing"]

T = TypeVar("T")

#: How long a rank that failed waits for the others, to tell them.
_FAREWELL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file of the checkpoints that are loaded.

    Attributes:
        origins: where its tensors begin, sorted.
    """

    source: Source
    item: ObjectInfo
    origins: Sequence[int]


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
        self._flight: Flight | None = None
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
        message = Message(purpose, Stage.ASKING, self._host, fetched_bytes=self._fetched_bytes(), value=value)
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
            mine = Stage.OVER if is_last else Stage.WAITING
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
        return self._round(jobs, Stage.ASKING, progress)[1]

    def launch(self, jobs: Sequence[CopyJob], progress: Progress | None = None) -> tuple[Filled, Flight] | None:
        """Begin to `fill`; others that fill meanwhile wait for what was launched on all ranks."""
        filled = self._round(jobs, Stage.ASKING, progress, goes_on=True)[1]
        return None if filled is None or self._flight is None else (filled, self._flight)

    def _round(
        self, jobs: Sequence[CopyJob], stage: Stage, progress: Progress | None, *, goes_on: bool = False
    ) -> tuple[list[Stage], Filled | None]:
        began = time.perf_counter()
        gap = self._config.coalesce_gap_bytes
        demands = [demand_of(job) for job in jobs]
        spans = pack(spans_of(demands, gap))
        digest = self._digest.digest()
        is_flying = self._flight is not None
        answers = self._meet(Message("load", stage, self._host, digest, spans, self._fetched_bytes(), is_flying))
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
        if any(answer.is_flying for answer in answers):
            # What ranks send each other is about one round at a time: none begins before all have ended the last.
            self._land()
            self._meet(Message("land", stage, self._host, fetched_bytes=self._fetched_bytes()))
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
        carry_out = partial(self._engines[0].carry_out, layout, requests, progress, exchange=node.round(reads))
        if goes_on:
            self._flight = Flight(partial(carry_out, times=FillTimes()))
        else:
            carry_out()
        return stages, self._account(reads, node.place, sum(demand.view.nbytes for demand in demands))

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.land()

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

    def _meet(self, message: Message) -> list[Message]:
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
        error = first_error(answers)
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
        said = with_rank(error, self._group.rank)
        if self._node is not None:
            self._node.give_up(said)
        # One that is gone, or stuck, is an error of its own, of which the others hear in the same way.
        try:
            timeout = min(_FAREWELL_SECONDS, self._config.share_timeout_seconds)
            message = Message("failure", Stage.OVER, self._host, error=said)
            chosen = first_error(self._group.gather(message, timeout_seconds=timeout))
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
