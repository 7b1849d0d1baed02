"""One load, step by step: open checkpoints, hand out their tensors, let the model's code run, report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from streamer.books import Books, OpenedPart, summarise
from streamer.checkpoint.checkpoint import Checkpoint, TensorInfo
from streamer.config import StreamConfig
from streamer.errors import ConfigError
from streamer.fetch.eager import iterate_tensors
from streamer.fetch.engine import FetchEngine, FillTimes, Progress
from streamer.fetch.fill import CopyJob
from streamer.fetch.flight import Flight
from streamer.fetch.headers import OpenedCheckpoint
from streamer.plan_cache.cache import Circumstances, PlanUse
from streamer.plan_cache.replay import replay
from streamer.report import LoadReport
from streamer.share.group import Group
from streamer.share.settling import settle_checksums
from streamer.share.sharing import SharedFile, Sharing
from streamer.sources.base import ObjectInfo, Source
from streamer.trace.barrier import tracing
from streamer.trace.leaks import give_values, refuse_leaks
from streamer.trace.storages import ModelStorages
from streamer.trace.tracer import Tracer, Weights
from streamer.verify import verify_copies

__all__ = ["LoadSession", "OpenedPart"]

Result = TypeVar("Result")


class LoadSession:
    """Runs a model's loading code over checkpoints; a context manager that releases everything.

    Engines that load from several checkpoints at once (vLLM's ``secondary_weights``) open each as a part.

    Args:
        model: see `streamer.load`.
        progress: called with bytes arrived and bytes wanted, per batch of reads.
        group: the ranks that load together, each with a session of its own, doing the same.
        circumstances: what the model's code may go by, for the plan cache; None if it may not be left out.

    Attributes:
        may_overlap: fetch what was traced so far while the trace goes on. Set it to false, on all ranks, before
            `open`, if the model's code makes ranks wait for each other while it loads, in an order of its own.

    Raises:
        ConfigError: ``share=require``, and there is no group.
    """

    def __init__(
        self,
        model: Any,
        config: StreamConfig,
        *,
        progress: Progress | None = None,
        group: Group | None = None,
        circumstances: Circumstances | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.tracer = Tracer(
            ModelStorages(model), self._fill, batch_bytes=config.buffer_bytes // 4, keep_completed=config.verify
        )
        self._progress = progress
        self._circumstances = circumstances
        self._parts: list[OpenedPart] = []
        self._items: list[ObjectInfo] = []
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.tracer.close)
        self._books = Books(began=time.monotonic())
        self.may_overlap = True
        self._failure: BaseException | None = None
        self._sharing: Sharing | None = None
        if group is None and config.share == "require":
            raise ConfigError(
                "share=require, and no process group says which ranks load together",
                hint="give load() a group, or set share=auto",
            )
        if group is not None and group.size > 1 and config.share != "off" and config.mode == "trace":
            self._sharing = Sharing(group, config, fetched_bytes=self._received)

    def __enter__(self) -> LoadSession:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        instead = None
        if error is not None and self._sharing is not None:
            instead = self._sharing.fail(error)
        self.close()
        if instead is not None:
            raise instead from error

    def close(self) -> None:
        """End the load: close the sources; lazy tensors that are left raise when used. Idempotent."""
        for flight in self._books.flights:
            if not flight.is_over:
                self._parts[0].engine.loop.interrupt()
                flight.wait()
        self._stack.close()
        self._failure = None  # its traceback refers to all of this
        self._books.flights.clear()

    # -- before: what there is to load -----------------------------------------------------------------

    def open(
        self,
        source: Source,
        *,
        only: Sequence[str] = (),
        prefix: str = "",
        keep: Callable[[Checkpoint, TensorInfo], bool] | None = None,
    ) -> OpenedPart:
        """Read the headers of a checkpoint, which then takes part in the load.

        Args:
            source: closed with the session.
            only: keys of the files to load, instead of choosing them.
            prefix: put before every tensor's name.
            keep: whether to hand out a tensor, asked with its name in the checkpoint.

        Raises:
            CheckpointError, SourceError: see `streamer.errors`.
        """
        began = time.monotonic()
        beside = self._parts[0].engine if self._parts else None
        shared = self._sharing is not None
        engine = self._stack.enter_context(FetchEngine(source, self.config, beside=beside, is_shared=shared))
        if self._sharing is not None and beside is None:
            self._stack.callback(self._sharing.close)
        before = dataclasses.replace(source.stats)  # a source may have been used before
        opened = self._read_headers(engine, only)
        first = len(self._items)
        tensors, marks = [], []
        # Counted over all tensors of the checkpoint, so that ranks that are shown different ones meet at the same.
        for number, info in enumerate(opened.checkpoint.tensors.values(), 1):
            if keep is None or keep(opened.checkpoint, info):
                moved = prefix or first
                tensors.append(
                    dataclasses.replace(info, name=prefix + info.name, file=first + info.file) if moved else info
                )
            every = self.config.overlap_tensors
            if every and number % every == 0 and number < len(opened.checkpoint.tensors):
                marks.append(len(tensors))
        received = source.stats.bytes_received - before.bytes_received
        source.stats.first_byte_at = None
        part = OpenedPart(engine, opened, tensors, tuple(marks), first, received, before)
        self._parts.append(part)
        self._items.extend(opened.items)
        self._books.headers_seconds += time.monotonic() - began
        return part

    def _read_headers(self, engine: FetchEngine, only: Sequence[str]) -> OpenedCheckpoint:
        """Read them, or have them read by one of the ranks that load together; all then have the same pins."""
        sharing = self._sharing
        if sharing is None:
            return engine.open_checkpoint(only=only)
        # Ranks that do not agree on the integrity would wait for meetings that the others do not come to.
        purpose = f"open {engine.source.url} with integrity={self.config.integrity}"
        opened = sharing.agree(purpose, lambda: engine.open_checkpoint(only=only))
        if not sharing.is_first:
            engine.confirm(opened)
        files = zip(opened.items, opened.checkpoint.origins(), strict=True)
        sharing.add(engine, [SharedFile(engine.source, item, starts) for item, starts in files])
        return opened

    def weights(self, part: OpenedPart, *, mode: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of `part`: lazy ones, or real ones in eager mode.

        Args:
            mode: instead of the configuration's.
        """
        if (mode or self.config.mode) == "eager":
            return iterate_tensors(part.engine, part.tensors, self._items, self._progress)
        return self._lazy_weights(part)

    def _lazy_weights(self, part: OpenedPart) -> Iterator[tuple[str, torch.Tensor]]:
        done = 0
        for mark in part.marks:
            for info in part.tensors[done:mark]:
                self.tracer.copies.look()
                yield info.name, self.tracer.lazy(info)
            done = mark
            if self.may_overlap:
                with self._together():
                    self.tracer.copies.launch(self._launch)
        for info in part.tensors[done:]:
            self.tracer.copies.look()
            yield info.name, self.tracer.lazy(info)
        self._complete_all()

    def _launch(self, jobs: Sequence[CopyJob]) -> Flight | None:
        flight = None
        if self._sharing is not None and self._sharing.is_open:
            launched = self._sharing.launch(jobs, self._progress)
            if launched is not None:
                filled, flight = launched
                self._books.fills.append(filled)
        if flight is None and jobs:
            flight = Flight(functools.partial(self._fill_alone, jobs, FillTimes()))
        if flight is not None:
            self._books.flights.append(flight)
        return flight

    def _complete_all(self, *, is_last: bool = False) -> None:
        with self._together(is_last=is_last):
            self.tracer.copies.complete_all()

    @contextlib.contextmanager
    def _together(self, *, is_last: bool = False) -> Iterator[None]:
        if self._sharing is None or self._sharing.has_parted:
            yield
            return
        with self.tracer.values.working(), self._sharing.window(is_last=is_last):
            yield

    def complete_touching(self, tensors: Iterable[torch.Tensor]) -> None:
        """Complete the copies into `tensors`, together with the other ranks, which must all come here as often."""
        with self._together():
            self.tracer.copies.complete_touching(tensors)

    def complete_touching_alone(self, tensors: Iterable[torch.Tensor]) -> None:
        """Complete the copies into `tensors`, whose bytes no other rank needs, whatever the others do meanwhile."""
        self.tracer.copies.complete_touching(tensors)

    # -- while the model's code runs ---------------------------------------------------------------------

    def run(self, load_weights: Callable[[Weights], Result], weights: Weights) -> Result:
        """Call the model's loading code with `weights`; when this returns, every byte is where it belongs.

        With ``plan_cache``, what it did last time may be done instead, and what it returned then returned.

        Args:
            weights: from `weights`, perhaps by way of the engine's own iterators.

        Raises:
            LeakedLazyTensorError: the model kept a lazy tensor.
            IntegrityError: ``integrity=checksums``, and what was read is not what the store was given.
            VerificationError: ``verify`` is on, and a parameter does not hold what its source holds.
        """
        plan = None
        if self.config.plan_cache:
            plan, weights = PlanUse.begin(self.config, self.model, self._circumstances, weights, self._tensors)
        if plan is not None and plan.recipe is not None:
            result = cast("Result", replay(plan.recipe, self.model, self.tracer, weights, self._tensors()))
            self._complete_all(is_last=True)
        else:
            result = self._trace(load_weights, weights if plan is None else plan.watch(weights, self.tracer))
        self._books.checksums = settle_checksums([part.engine for part in self._parts], self._sharing)
        if self._sharing is not None:
            self._sharing.part()
        refuse_leaks(self.model)
        if self.config.verify:
            received, filled = self._received(), len(self._books.fills)
            self._books.verified = verify_copies(self.tracer, self.model, self._read)
            self._books.verified_bytes = self._received() - received
            del self._books.fills[filled:]  # computed again, for nobody's need
        if plan is not None:
            self._books.plan_cache = plan.finish(result, self.tracer, len(self._parts))
        return result

    def _trace(self, load_weights: Callable[[Weights], Result], weights: Weights) -> Result:
        with tracing(self.tracer):
            result = load_weights(weights)
            self._raise_what_was_swallowed()
            give_values(self.model, self.tracer)
            self._complete_all(is_last=True)
        return result

    def _received(self) -> int:
        return sum(part.received_bytes for part in self._parts)

    def _part_of(self, file: int) -> OpenedPart:
        return self._parts[bisect_right(self._parts, file, key=lambda part: part.first_file) - 1]

    def _fill(self, jobs: Sequence[CopyJob]) -> None:
        try:
            self._fill_now(jobs)
        except BaseException as error:
            self._failure = error
            raise

    def _raise_what_was_swallowed(self) -> None:
        """Raise an error of reading that the model's code caught: it cannot know what of its memory is right."""
        failed = self._failure or next((flight.error for flight in self._books.flights if flight.error), None)
        if failed is not None:
            raise failed

    def _fill_now(self, jobs: Sequence[CopyJob]) -> None:
        if self._sharing is not None and self._sharing.is_open:
            filled = self._sharing.fill(jobs, self._progress)
            if filled is not None:
                self._books.fills.append(filled)
                return
        self._fill_alone(jobs)

    def _fill_alone(self, jobs: Sequence[CopyJob], times: FillTimes | None = None) -> None:
        by_part: dict[int, list[CopyJob]] = {}
        for job in jobs:
            by_part.setdefault(self._part_of(job.file).first_file, []).append(job)
        for first_file, group in by_part.items():
            engine = self._part_of(first_file).engine
            self._books.fills.append(engine.fill(group, self._items, self._progress, times))

    def _read(self, reads: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Read ``(file, start, end)`` ranges, without the planner, in the order given."""
        found = []
        for file, start, end in reads:
            found.append(self._part_of(file).engine.read_range(self._items[file], start, end))
        return found

    def names(self) -> list[str]:
        """Return the names of all tensors that are handed out."""
        return [info.name for info in self._tensors()]

    def _tensors(self) -> list[TensorInfo]:
        return [info for part in self._parts for info in part.tensors]

    # -- after: what came of it --------------------------------------------------------------------------

    def note(self, *, loaded: Iterable[str], unexpected: Sequence[str] = ()) -> None:
        """Take down what the model's code says: names it loaded, tensors it has no place for."""
        self._books.loaded = frozenset(loaded)
        self._books.unexpected = tuple(unexpected)

    def expected(self) -> dict[str, torch.Tensor]:
        """Return what should get values, by name."""
        if not isinstance(self.model, torch.nn.Module):
            return {}
        if callable(getattr(self.model, "load_weights", None)):
            return dict(self.model.named_parameters(remove_duplicate=False))
        state = self.model.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    def report(self) -> LoadReport:
        """Sum up, after `run`."""
        return summarise(self.config, self._parts, self.tracer, self._books, self.expected(), self._sharing)
