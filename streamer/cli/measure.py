"""Measures a store from this machine: the first byte, one connection, and loads of several shapes.

Ranges of a checkpoint's weights are read as a load reads them, by the source that it would have, into memory that is
used again and again. Nothing is looked at or kept.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamer.checkpoint.checkpoint import Checkpoint
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, ConfigError
from streamer.fetch.headers import read_checkpoint
from streamer.option_values import parse_byte_count
from streamer.plan.timing import StoreModel
from streamer.sources import ObjectInfo, Source, open_source, split_file
from streamer.sources.tasks import FlatTaskGroup

__all__ = ["Grid", "Measured", "Run", "measure"]

#: How often the time to the first byte and the rate of one connection are measured; medians count.
_PROBES, _RATE_PROBES = 15, 5
_PROBE_BYTES = 1024
#: Steps by this part of all ranges (the golden ratio's) spread any number of reads evenly over files and positions.
_STEP = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Grid:
    """What to measure: every concurrency with every request size, each for `seconds`, within `max_bytes` in all."""

    concurrencies: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: float
    max_bytes: int

    @classmethod
    def parse(cls, concurrencies: str, sizes: str, seconds: float, max_bytes: str) -> Grid:
        """Read the options of the command line.

        Raises:
            ConfigError: one of them is not what it should be.
        """
        try:
            numbers = tuple(int(number) for number in concurrencies.split(","))
        except ValueError:
            raise ConfigError(f"--concurrency {concurrencies!r} is no list of numbers", hint="example: 8,32") from None
        if not 0 < seconds < float("inf"):
            raise ConfigError(f"--seconds must be a positive number, not {seconds}")
        return cls(numbers, tuple(map(parse_byte_count, sizes.split(","))), seconds, parse_byte_count(max_bytes))

    def configs(self, config: StreamConfig) -> list[StreamConfig]:
        """Return `config` with each setting.

        Raises:
            ConfigError: a setting is out of range, or a load would not use it.
        """
        found = [
            config.replace(concurrency=concurrency, request_bytes=size)
            for concurrency in self.concurrencies
            for size in self.sizes
        ]
        for one in found:
            if one.concurrency * one.request_bytes > one.buffer_bytes:
                raise ConfigError(
                    f"{one.concurrency} requests of {one.request_bytes} bytes do not fit buffer_bytes="
                    f"{one.buffer_bytes}, and a load would make smaller ones",
                    hint="measure less at once, or set --option buffer_bytes",
                )
        return found


@dataclass(slots=True)
class Run:
    """One setting, measured: from the first read after the warm-up to the end of the last.

    Attributes:
        sizes: bytes of each read, in the order of their ends.
    """

    config: StreamConfig
    sizes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    requests: int = 0
    retries: int = 0
    throttled: int = 0
    hedges: int = 0

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return sum(self.sizes) / self.seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found.

    Attributes:
        model: of this store. Its link is the highest rate of any run, so that this run is predicted by what it showed.
        requests, nbytes: of everything, headers, probes and warm-ups included.
    """

    checkpoint: Checkpoint
    model: StoreModel
    runs: list[Run]
    requests: int
    nbytes: int


class _Ranges:
    """Endless ranges of the checkpoint's files, in an order that spreads any number of them.

    Args:
        nbytes: of each; whole files where all are smaller.
        phase: from 0 to 1, where to begin.
    """

    def __init__(self, items: Sequence[ObjectInfo], nbytes: int, phase: float = 0.0) -> None:
        self._items = [item for item in items if item.size >= nbytes] or items
        self._ends = list(itertools.accumulate(max(1, item.size // nbytes) for item in self._items))
        self._nbytes = nbytes
        self._position = phase

    def __next__(self) -> tuple[ObjectInfo, int, int]:
        """Return an object, where to begin in it, and how many bytes to read."""
        number = int(self._position * self._ends[-1])
        place = bisect.bisect_right(self._ends, number)
        item = self._items[place]
        start = (number - (self._ends[place - 1] if place else 0)) * self._nbytes
        self._position = (self._position + _STEP) % 1.0
        return item, start, min(self._nbytes, item.size - start)


async def measure(
    url: str,
    config: StreamConfig,
    configs: Sequence[StreamConfig],
    grid: Grid,
    progress: Callable[[int, int], None],
) -> Measured:
    """Measure each of `configs` in turn.

    Args:
        configs: from `grid`.
        progress: called with settings measured and settings to measure.

    Raises:
        ConfigError: the cap is too low for what is to be measured.
        CheckpointError, SourceError: as of a load.
    """
    root, only = split_file(url)
    source = open_source(root, config)
    try:
        opened = await read_checkpoint(source, config, only=[only] if only else [])
        checkpoint, items = opened.checkpoint, opened.items
        if not checkpoint.nbytes:
            raise CheckpointError(f"{source.url} holds no weights to read")
        largest = max(item.size for item in items)
        _require_enough(grid, configs, largest, source.stats.bytes_received)
        memory = memoryview(bytearray(max(one.concurrency * one.request_bytes for one in configs)))
        first_byte, per_connection = await _probe(source, items, memory[: min(max(grid.sizes), largest)])
    finally:
        await source.close()
    stats = [source.stats]
    runs: list[Run] = []
    for number, one in enumerate(configs):
        progress(number, len(configs))
        left = grid.max_bytes - sum(each.bytes_received for each in stats)
        # A source of its own: how hard it presses the store follows what the store said to it.
        source = open_source(root, one)
        try:
            ranges = _Ranges(items, one.request_bytes, number / len(configs))
            runs.append(await _run(source, one, ranges, memory, grid.seconds, left // (len(configs) - number)))
        finally:
            await source.close()
        stats.append(source.stats)
    progress(len(configs), len(configs))
    return Measured(
        checkpoint,
        StoreModel(first_byte, per_connection, max(run.rate for run in runs)),
        runs,
        sum(each.requests for each in stats),
        sum(each.bytes_received for each in stats),
    )


def _require_enough(grid: Grid, configs: Sequence[StreamConfig], largest: int, spent: int) -> None:
    """Refuse a cap under which some connection would make no read after its first, which warms up."""
    probes = (_RATE_PROBES + 1) * min(max(grid.sizes), largest) + (_PROBES + 1) * min(_PROBE_BYTES, largest)
    reads = max(one.concurrency * min(one.request_bytes, largest) for one in configs)
    least = spent + probes + 2 * reads * len(configs)
    if grid.max_bytes < least:
        raise ConfigError(
            f"--max-bytes {grid.max_bytes} is less than two reads for each connection, {least} bytes in all",
            hint="allow more, or measure fewer or smaller settings",
        )


async def _probe(source: Source, items: Sequence[ObjectInfo], buffer: memoryview) -> tuple[float, float]:
    """Return seconds to the first byte, and the rate of one connection, each of a store that does nothing else for us.

    The rate is that of the bytes by which a large read exceeds a small one. Where both take equally long, as they do
    from memory, it is that of the whole large read.
    """

    async def median_of(times: int, view: memoryview) -> float:
        ranges = _Ranges(items, len(view))
        taken = []
        for _ in range(times + 1):
            item, start, count = next(ranges)
            began = time.perf_counter()
            await source.read_into(item, start, [view[:count]])
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])  # the first connects

    small = buffer[:_PROBE_BYTES]
    first_byte = await median_of(_PROBES, small)
    whole = await median_of(_RATE_PROBES, buffer)
    if whole > first_byte and len(buffer) > len(small):
        return first_byte, (len(buffer) - len(small)) / (whole - first_byte)
    return first_byte, len(buffer) / whole


async def _run(
    source: Source,
    config: StreamConfig,
    ranges: _Ranges,
    memory: memoryview,
    seconds: float,
    max_bytes: int,
) -> Run:
    """Keep every connection reading for `seconds`, or until `max_bytes` were asked for; what began is finished."""
    size = config.request_bytes
    buffers = [memory[place * size : (place + 1) * size] for place in range(config.concurrency)]
    run = Run(config)
    asked = 0

    async def read(buffer: memoryview) -> int:
        nonlocal asked
        item, start, count = next(ranges)
        asked += count
        await source.read_into(item, start, [buffer[:count]])
        return count

    async def keep_reading(buffer: memoryview) -> None:
        run.sizes.append(await read(buffer))
        while time.perf_counter() < ends and asked + size <= max_bytes:
            run.sizes.append(await read(buffer))

    async with FlatTaskGroup() as group:  # every connection is made, and has grown its window
        for buffer in buffers:
            group.create_task(read(buffer))
    before = dataclasses.replace(source.stats)
    began, cpu = time.perf_counter(), time.process_time()
    ends = began + seconds
    async with FlatTaskGroup() as group:
        for buffer in buffers:
            group.create_task(keep_reading(buffer))
    run.seconds, run.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    run.requests = source.stats.requests - before.requests
    run.retries = source.stats.retries - before.retries
    run.throttled = source.stats.throttled - before.throttled
    run.hedges = source.stats.hedges - before.hedges
    return run
