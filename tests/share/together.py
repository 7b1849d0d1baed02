"""Ranks as threads of one process, each with its own session, over real shared memory and real pipes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from streamer.config import StreamConfig
from streamer.errors import LoadError
from streamer.report import LoadReport
from streamer.session import LoadSession
from streamer.sources.base import ObjectInfo
from streamer.sources.memory import MemorySource

T = TypeVar("T")
Weights = Any
LoadWeights = Callable[[int, Weights], Any]


class Meeting:
    """What the groups of one run have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def wait(self, timeout_seconds: float) -> None:
        try:
            self.barrier.wait(timeout_seconds)
        except threading.BrokenBarrierError:
            raise LoadError("a rank did not come") from None


@dataclass
class ThreadGroup:
    """A `streamer.share.group.Group` of threads."""

    rank: int
    meeting: Meeting
    host: str = "here"
    gathered: int = 0

    @property
    def size(self) -> int:
        return self.meeting.size

    def gather(self, value: T, *, timeout_seconds: float) -> list[T]:
        self.gathered += 1
        self.meeting.values[self.rank] = value
        self.meeting.wait(timeout_seconds)
        answers = list(self.meeting.values)
        self.meeting.wait(timeout_seconds)
        return answers

    def broadcast(self, value: T | None, *, source: int) -> T:
        answers = self.gather(value, timeout_seconds=10)
        found = answers[source]
        assert found is not None
        return found


class CountingSource(MemorySource):
    """Remembers every read; fails those that `fails` accepts."""

    def __init__(
        self, objects: Mapping[str, bytes], fails: Callable[[str, int], Exception | None] | None = None
    ) -> None:
        super().__init__(objects)
        self.reads: list[tuple[str, int, int]] = []
        self._fails = fails

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        error = self._fails(item.key, start) if self._fails else None
        if error is not None:
            raise error
        await super().read_into(item, start, buffers)
        self.reads.append((item.key, start, start + sum(map(len, buffers))))


class Parameters(torch.nn.Module):
    """Parameters whose loading code is given from outside."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, load_weights: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.load_weights = load_weights
        for name, shape in shapes.items():
            self.register_parameter(
                name, torch.nn.Parameter(torch.full(tuple(shape), -1.0, dtype=dtype), requires_grad=False)
            )


@dataclass
class Rank:
    """What became of one rank."""

    source: CountingSource
    group: ThreadGroup
    model: Any = None
    report: LoadReport | None = None
    error: BaseException | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def on_ranks(
    size: int,
    work: Callable[[Rank, LoadSessionFactory], None],
    source: Callable[[int], CountingSource],
    *,
    hosts: Sequence[str] = (),
    timeout: float = 60,
    **options: Any,
) -> list[Rank]:
    """Run `work` on `size` threads at once and return what became of each; errors are kept, not raised."""
    meeting = Meeting(size)
    ranks = [
        Rank(source(number), ThreadGroup(number, meeting, hosts[number] if hosts else "here")) for number in range(size)
    ]
    config = StreamConfig(**{"share_timeout_seconds": 20.0, **options})

    def run(rank: Rank) -> None:
        try:
            work(rank, lambda model: LoadSession(model, config, group=rank.group))
        except BaseException as error:
            rank.error = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a rank hangs"
    return ranks


LoadSessionFactory = Callable[[Any], LoadSession]
