"""The values behind lazy tensors: which bytes they need, fetched together, and functions applied to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamer.errors import LeakedLazyTensorError, LoadError
from streamer.fetch.fill import CopyJob
from streamer.plan.geometry import View
from streamer.report import ForcedRead
from streamer.trace.layout import alias_of
from streamer.trace.lazy import (
    Base,
    DeferredBase,
    FileBase,
    LazyTensor,
    describe_base,
    file_names,
    map_lazies,
    walk,
)

__all__ = ["Fill", "Values", "job_for", "leaves_of", "mark_used"]

#: Fetches and places the bytes of copy jobs; returns when they are there.
Fill = Callable[[Sequence[CopyJob]], object]


def _refuse(jobs: Sequence[CopyJob]) -> None:
    raise AssertionError("the load has ended")


class Values:
    """Computes real tensors for lazy ones.

    Args:
        fill: how bytes are fetched.
        dry_run: nothing is fetched; every value is zero.
    """

    def __init__(self, fill: Fill, *, dry_run: bool) -> None:
        self.fill = fill
        self._dry_run = dry_run
        self._closed = False
        self.busy = False
        """True while bytes are fetched or copied; what happens then is ours and not the model's."""
        self.barrier: TorchDispatchMode | None = None
        """What watches the model's code, and steps aside meanwhile."""
        self.materialised: list[ForcedRead] = []
        self.would_read: list[LazyTensor] = []
        """In a dry run, the views of file tensors that something insisted on."""

    def close(self) -> None:
        """End the load: from now on, a leaked lazy tensor raises instead of reading."""
        self._closed = True
        self.fill = _refuse
        self.barrier = None

    def materialise(self, lazies: Sequence[LazyTensor], why: str) -> Callable[[LazyTensor], torch.Tensor]:
        """Compute `lazies` now; return a function from each to its value. `why` goes into the report."""
        self.note(why, lazies)
        values = {id(lazy): value for lazy, value in zip(lazies, self.evaluate(lazies), strict=True)}
        return lambda lazy: values[id(lazy)]

    def note(self, why: str, lazies: Sequence[LazyTensor]) -> None:
        """Record that `why` needs the bytes of `lazies` at once, if there are any to fetch."""
        nbytes = sum(leaf.lazy_layout.view().nbytes for leaf in leaves_of(lazies))
        if nbytes:
            self.materialised.append(ForcedRead(why, file_names(lazies), nbytes))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark what happens inside as our own doing."""
        was_busy, self.busy = self.busy, True
        try:
            with torch.no_grad(), _aside(self.barrier):
                yield
        finally:
            self.busy = was_busy

    def evaluate(self, lazies: Sequence[LazyTensor]) -> list[torch.Tensor]:
        """Compute real tensors for `lazies`, fetching the bytes of all of them together."""
        if self._closed:
            raise LeakedLazyTensorError(
                f"{lazies[0]!r} was used after its load had ended",
                hint="load with mode=eager, which yields ordinary tensors",
            )
        with self.working():
            fetched = self._fetch(leaves_of(lazies))
            roots: dict[int, torch.Tensor] = {}
            return [self._resolve(lazy, fetched, roots) for lazy in lazies]

    def _fetch(self, leaves: Sequence[LazyTensor]) -> dict[int, torch.Tensor]:
        fetched: dict[int, torch.Tensor] = {}
        jobs = []
        for lazy in leaves:
            mark_used(lazy.lazy_base)
            if self._dry_run:
                self.would_read.append(lazy)
                fetched[id(lazy)] = torch.zeros(lazy.shape, dtype=lazy.dtype)
                continue
            destination = torch.empty(lazy.shape, dtype=lazy.dtype)
            job = job_for(lazy, destination)
            if job is None:
                job, destination = _covering(lazy)
            fetched[id(lazy)] = destination
            jobs.append(job)
        if jobs:
            self.fill(jobs)
        return fetched

    def _resolve(
        self, lazy: LazyTensor, fetched: dict[int, torch.Tensor], roots: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        base = lazy.lazy_base
        if base.owned is not None:
            return alias_of(base.owned, lazy.lazy_layout)
        if not isinstance(base, DeferredBase):
            return fetched[id(lazy)]
        if id(base) not in roots:

            def value(inner: LazyTensor) -> torch.Tensor:
                return self._resolve(inner, fetched, roots)

            result = base.func(*map_lazies(base.args, value), **map_lazies(base.kwargs, value))
            roots[id(base)] = _conform(result, base)
        return alias_of(roots[id(base)], lazy.lazy_layout)


@contextmanager
def _aside(barrier: TorchDispatchMode | None) -> Iterator[None]:
    """Take `barrier` off torch's stack, if nothing else is on it: each of the many copies of a fill would call it."""
    alone = torch._C._len_torch_dispatch_stack() == 1 and torch._C._get_dispatch_stack_at(0) is barrier
    if barrier is None or not alone:
        yield
        return
    try:
        torch._C._pop_torch_dispatch_stack(None)
        yield
    finally:
        torch._C._push_on_torch_dispatch_stack(barrier)


def leaves_of(lazies: Sequence[LazyTensor]) -> list[LazyTensor]:
    """Return the views of file tensors whose bytes `lazies` need, each once."""
    found: dict[int, LazyTensor] = {}
    seen: set[int] = set()
    stack = list(reversed(lazies))
    while stack:
        lazy = stack.pop()
        base = lazy.lazy_base
        if base.owned is not None:
            continue
        if isinstance(base, DeferredBase):
            if id(base) not in seen:
                seen.add(id(base))
                stack.extend(base.inputs())
        else:
            found[id(lazy)] = lazy
    return list(found.values())


def mark_used(base: Base) -> None:
    if isinstance(base, FileBase):
        base.used = True
        return
    for reached in walk(base):
        if isinstance(reached, FileBase):
            reached.used = True


def job_for(source: LazyTensor, destination: torch.Tensor) -> CopyJob | None:
    """Return the job that fills `destination`, or None when the source must be computed or untangled."""
    base = source.lazy_base
    if base.owned is not None or not isinstance(base, FileBase):
        return None
    layout = source.lazy_layout
    if not layout.is_ordered:
        return None
    return CopyJob(destination, base.info.file, layout.view(base.info.start), base.info.start, source.dtype)


def _covering(source: LazyTensor) -> tuple[CopyJob, torch.Tensor]:
    """For views whose elements overlap: fetch the covering bytes, and view them as `source` does."""
    base = source.lazy_base
    assert isinstance(base, FileBase)
    view = source.lazy_layout.view(base.info.start)
    length = view.end - view.offset
    raw = torch.empty(length, dtype=torch.uint8)
    job = CopyJob(raw, base.info.file, View(view.offset, 1, (length,), (1,)), base.info.start, torch.uint8)
    value = raw.view(source.dtype).as_strided(source.shape, source.lazy_layout.strides)
    return job, value


def _conform(result: Any, base: DeferredBase) -> torch.Tensor:
    """Give a computed result the layout that views of it were derived from."""
    wanted = base.layout
    if not isinstance(result, torch.Tensor) or result.shape != wanted.shape or result.dtype != wanted.dtype:
        raise LoadError(f"{describe_base(base)} gave another shape or dtype than expected", hint="load with mode=eager")
    if result.stride() == wanted.strides and not result.storage_offset():
        return result
    laid_out = torch.empty_strided(wanted.shape, wanted.strides, dtype=wanted.dtype, device=result.device)
    return laid_out.copy_(result)
