"""Whole tensors, in file order, fetched ahead within a byte budget.

Every tensor has memory of its own and owns it for as long as it is referenced: nothing is recycled, so
``list(iterator)`` is correct under any budget. The budget bounds what is fetched ahead of the consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from streamer.checkpoint.checkpoint import TensorInfo
from streamer.fetch.budget import ByteBudget
from streamer.fetch.dtypes import torch_dtype, torch_shape
from streamer.fetch.engine import FetchEngine, Progress, request_bytes_for
from streamer.fetch.memory import bytes_of
from streamer.sources.base import ObjectInfo, Source

__all__ = ["iterate_tensors"]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Neighbours in one file that one request can hold, or one larger tensor."""

    item: ObjectInfo
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        return self.tensors[-1].end - self.tensors[0].start


@dataclass(frozen=True, slots=True)
class _Fetched:
    batch: _Batch
    tensors: list[torch.Tensor]


def iterate_tensors(
    engine: FetchEngine, tensors: Sequence[TensorInfo], items: Sequence[ObjectInfo], progress: Progress | None = None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield ``(name, tensor)`` for `tensors`, which must be in file and data order.

    Raises:
        UnsupportedCheckpointError: a dtype that torch cannot hold, before anything is fetched.
        SourceError: see `streamer.errors`.
    """
    for info in tensors:
        torch_dtype(info), torch_shape(info)
    request_bytes = request_bytes_for(engine.config)
    budget = ByteBudget(engine.config.buffer_bytes)
    batches = list(_batches(tensors, items, request_bytes))

    def open_items() -> contextlib.AbstractAsyncContextManager[AsyncIterator[_Fetched]]:
        return _open_batches(engine.source, batches, budget, request_bytes, engine.config.concurrency)

    arrived, total = 0, sum(batch.nbytes for batch in batches)
    with contextlib.closing(engine.loop.iterate(open_items)) as fetched:
        while True:
            began = time.perf_counter()
            arrival = next(fetched, None)
            engine.times.fetch += time.perf_counter() - began
            if arrival is None:
                return
            arrived += arrival.batch.nbytes
            if progress is not None:
                progress(arrived, total)
            # Popped, so that only the consumer holds what it was given.
            arrival.tensors.reverse()
            for info in arrival.batch.tensors:
                yield info.name, arrival.tensors.pop()
            nbytes = arrival.batch.nbytes
            engine.loop.call_soon(lambda nbytes=nbytes: budget.release(nbytes))  # type: ignore[misc]


def _batches(tensors: Iterable[TensorInfo], items: Sequence[ObjectInfo], request_bytes: int) -> Iterator[_Batch]:
    group: list[TensorInfo] = []
    for info in tensors:
        fits = group and group[-1].file == info.file and group[-1].end == info.start
        if fits and info.end - group[0].start <= request_bytes:
            group.append(info)
            continue
        if group:
            yield _Batch(items[group[0].file], tuple(group))
        group = [info]
    if group:
        yield _Batch(items[group[0].file], tuple(group))


@contextlib.asynccontextmanager
async def _open_batches(
    source: Source, batches: Sequence[_Batch], budget: ByteBudget, request_bytes: int, concurrency: int
) -> AsyncIterator[AsyncIterator[_Fetched]]:
    started: asyncio.Queue[asyncio.Task[_Fetched]] = asyncio.Queue()
    gate = asyncio.Semaphore(concurrency)
    tasks: set[asyncio.Task[_Fetched]] = set()

    def forget(task: asyncio.Task[_Fetched]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody awaits a batch behind the one that fails first

    async def start_all() -> None:
        for batch in batches:
            await budget.acquire(batch.nbytes)
            task = asyncio.ensure_future(_fetch(source, batch, gate, request_bytes))
            tasks.add(task)
            task.add_done_callback(forget)
            started.put_nowait(task)

    async def drain() -> AsyncIterator[_Fetched]:
        for _ in batches:
            yield await (await started.get())

    starter = asyncio.ensure_future(start_all())
    draining = drain()
    try:
        yield draining
    finally:
        starter.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(starter, *tasks, return_exceptions=True)


async def _fetch(source: Source, batch: _Batch, gate: asyncio.Semaphore, request_bytes: int) -> _Fetched:
    raw = [torch.empty(info.nbytes, dtype=torch.uint8) for info in batch.tensors]
    memory = [bytes_of(tensor) for tensor in raw if tensor.numel()]
    first = batch.tensors[0].start
    if batch.nbytes <= request_bytes:
        reads = [(first, memory)] if memory else []
    else:
        (whole,) = memory
        reads = [
            (first + start, [whole[start : start + request_bytes]]) for start in range(0, batch.nbytes, request_bytes)
        ]

    async def read(start: int, buffers: list[memoryview]) -> None:
        async with gate:
            await source.read_into(batch.item, start, buffers)

    parts = [asyncio.ensure_future(read(*part)) for part in reads]
    try:
        await asyncio.gather(*parts)
    finally:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
    return _Fetched(
        batch,
        [
            tensor.view(torch_dtype(info)).reshape(torch_shape(info))
            for info, tensor in zip(batch.tensors, raw, strict=True)
        ],
    )
