"""How long reads take: on one machine by arithmetic, on many that start together by simulation.

A store is three numbers: the time to the first byte of an answer, the rate of one connection after that, and the rate
of the machine's link. They are constant here. Real ones vary, and the slowest of many answers decides how long a
load takes, so that what is said here is nearer to the least than to the most. Listings, headers, tracing and copying
are left out.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from streamer.config import StreamConfig
from streamer.errors import ConfigError

__all__ = [
    "REQUESTS_PER_SECOND_PER_PREFIX",
    "Projection",
    "StoreModel",
    "predict_node_seconds",
    "predict_seconds",
    "project",
]

#: GETs that S3 takes of one partitioned prefix, at least;
#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
REQUESTS_PER_SECOND_PER_PREFIX = 5500

#: Of `streamer.transport.pressure`, which a pure module cannot import; tests hold it and the waits to the original.
_THROTTLED_FACTOR = 2 / 3
_FIRST_ROUND_SECONDS = 0.1
#: Of `streamer.transport.climb`, likewise.
_CLIMB_FACTOR = 2
_CLIMB_LEAST_GAIN = 1.15
_CLIMB_WINDOW_SECONDS = 0.25

#: With more requests than this, fewer nodes are simulated, against their share of the limit; but never only one.
_MOST_SIMULATED = 50_000
_FEWEST_SIMULATED = 2


@dataclass(frozen=True, slots=True)
class StoreModel:
    """A store, as seen from one machine.

    Attributes:
        first_byte_seconds: from asking to the first byte of the answer.
        bytes_per_second_per_connection: from then on, one answer at a time per connection.
        link_bytes_per_second: of all connections of the machine together; None when it is no limit.

    Raises:
        ConfigError: a time or rate that there is not.
    """

    first_byte_seconds: float
    bytes_per_second_per_connection: float
    link_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first_byte_seconds < math.inf:
            raise ConfigError(f"the time to the first byte must be zero seconds or more, not {self.first_byte_seconds}")
        for what, rate in (
            ("a connection", self.bytes_per_second_per_connection),
            ("the link", self.link_bytes_per_second),
        ):
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigError(f"the rate of {what} must be a positive number, not {rate}")

    def request_seconds(self, nbytes: float) -> float:
        """Return how long one request takes on a link that is free."""
        return self.first_byte_seconds + nbytes / self.bytes_per_second_per_connection

    def link_seconds(self, nbytes: float) -> float:
        """Return how long `nbytes` take if they keep the link full from the first byte on: the fluid bound."""
        if not nbytes:
            return 0.0
        return self.first_byte_seconds + (nbytes / self.link_bytes_per_second if self.link_bytes_per_second else 0.0)


def predict_seconds(
    reads: Sequence[int], concurrency: int, model: StoreModel, most: int | None = None, sharers: int = 1
) -> float:
    """Return how long `reads` take on one machine.

    Each goes to the connection that is free first, in order (list scheduling), and the whole is no faster than the
    link. Refusals, retries and answers slower than their like are not in it.

    Args:
        reads: bytes of each request.
        concurrency: connections, at least 1.
        most: how many they may become, by doubling for as long as that brings more (`streamer.transport.climb`).
        sharers: how many do the same at the other ends of the link, so that more connections find it full earlier.
    """
    free = [0.0] * concurrency
    total = sum(reads)
    openings = _openings(concurrency, most or 0, total / max(1, len(reads)), model, sharers)
    for nbytes in reads:
        while openings and openings[0][0] <= free[0]:
            opened_at, count = openings.popleft()
            for _ in range(count):
                heapq.heappush(free, opened_at)
        heapq.heapreplace(free, free[0] + model.request_seconds(nbytes))
    return max(*free, model.link_seconds(total))


def _openings(concurrency: int, most: int, nbytes: float, model: StoreModel, sharers: int) -> deque[tuple[float, int]]:
    """Return when how many more connections join, whose requests are of `nbytes`."""
    found: deque[tuple[float, int]] = deque()
    seconds = model.request_seconds(nbytes)
    link = (model.link_bytes_per_second or math.inf) / sharers
    at, count = 0.0, concurrency
    while count < most and nbytes:
        more = min(most, _CLIMB_FACTOR * count)
        rates = [min(number * nbytes / seconds, link) for number in (count, more)]
        if rates[1] < _CLIMB_LEAST_GAIN * rates[0]:
            break  # tried and taken back, at the cost of nothing: the link is full
        at += 2 * max(_CLIMB_WINDOW_SECONDS, 2 * seconds)  # one that is not counted, and one that is
        found.append((at, more - count))
        count = more
    return found


def predict_node_seconds(
    reads: Sequence[Sequence[int]], concurrency: int, model: StoreModel, most: int | None = None
) -> float:
    """Return when the slowest of a node's ranks is done; they share its link.

    Args:
        reads: of each rank, as for `predict_seconds`.
        concurrency: connections of each rank.
        most: how many each rank's may become.
    """
    sharers = max(1, sum(1 for own in reads if own))
    slowest = max((predict_seconds(own, concurrency, model, most, sharers) for own in reads), default=0.0)
    return max(slowest, model.link_seconds(sum(map(sum, reads))))


@dataclass(frozen=True, slots=True)
class Projection:
    """What comes of nodes that start together.

    Attributes:
        seconds: until the last of them is done.
        refused: requests that the store turned away, each time counted.
        gave_up: requests that were refused so often, or for so long, that the load they belong to would have failed;
            in the simulation they go on.
    """

    nodes: int
    seconds: float
    refused: int
    gave_up: int


def project(
    nodes: int,
    requests_per_node: int,
    bytes_per_node: int,
    *,
    model: StoreModel,
    config: StreamConfig,
    ranks: int = 1,
    requests_per_second_per_prefix: float = REQUESTS_PER_SECOND_PER_PREFIX,
    seed: int = 0,
) -> Projection:
    """Simulate `nodes` that all begin to read one prefix at the same moment.

    Modelled: each of a node's ranks has ``config.concurrency`` reads of equal size under way; the ranks of a node share
    its link; the store takes so many requests in any one second and refuses the rest after the time to the first
    byte; a client that is refused waits as its retry options say and keeps fewer requests in flight
    (`streamer.transport.retry`, `streamer.transport.pressure`).

    Not modelled: that S3 splits a prefix that is asked much for, which takes it minutes and raises the limit; other
    traffic to the prefix; a limit of the store's on bytes; ``Retry-After``; hedges; the caps of the configuration;
    connections that break.

    Where all nodes together make more than about 50,000 requests, fewer nodes are simulated, against the
    part of the limit that is theirs, and the counts are scaled up. Few nodes come together in one instant less often
    than many, so that both then come out somewhat low, the counts by up to a third.

    Args:
        requests_per_node, bytes_per_node: of all its ranks together.
        ranks: processes per node.
        seed: the same one gives the same result.
    """
    simulated = min(nodes, max(_FEWEST_SIMULATED, _MOST_SIMULATED // max(1, requests_per_node)))
    limit = requests_per_second_per_prefix * simulated / nodes
    fleet = _Fleet(model, config, limit, random.Random(seed))
    fleet.start(simulated, requests_per_node, bytes_per_node / max(1, requests_per_node), ranks)
    seconds = fleet.run()
    scale = nodes / simulated
    return Projection(nodes, seconds, round(fleet.refused * scale), round(fleet.gave_up * scale))


class _Store:
    """Takes a number of requests in any one second."""

    def __init__(self, per_second: float) -> None:
        # Whole requests in a window that need not be one second, so that the rate is right for fractions too.
        most = max(1, round(per_second))
        self._window = most / per_second
        self._taken: deque[float] = deque(maxlen=most)

    def takes(self, now: float) -> bool:
        taken = self._taken
        if len(taken) == taken.maxlen and now - taken[0] < self._window:
            return False
        taken.append(now)  # and forgets the oldest
        return True


class _Read:
    """One read of a rank, however often it is tried."""

    __slots__ = ("began", "failures", "has_given_up")

    def __init__(self, began: float) -> None:
        self.began = began
        self.failures = 0
        self.has_given_up = False


class _Node:
    __slots__ = ("link_free_at",)

    def __init__(self) -> None:
        self.link_free_at = 0.0


class _Rank:
    """One process: reads not begun yet, reads waiting for their turn, and how many may be in flight."""

    __slots__ = ("in_flight", "left", "limit", "lowered_at", "most", "node", "round_seconds", "waiting")

    def __init__(self, node: _Node, left: int, most: int) -> None:
        self.node = node
        self.left = left
        self.most = most
        self.limit = float(most)
        self.in_flight = 0
        self.waiting: deque[_Read] = deque()
        self.lowered_at = -math.inf
        self.round_seconds = _FIRST_ROUND_SECONDS

    def answered(self, seconds: float) -> None:
        self.round_seconds = seconds or _FIRST_ROUND_SECONDS
        self.limit = min(float(self.most), self.limit + 1 / self.limit)

    def refused(self, now: float) -> None:
        if now - self.lowered_at >= self.round_seconds:
            self.limit = max(1.0, self.limit * _THROTTLED_FACTOR)
            self.lowered_at = now


def _longest_wait(config: StreamConfig, failures: int) -> float:
    return min(config.retry_longest_wait_seconds, config.retry_first_wait_seconds * 2.0 ** min(failures - 1, 40))


_DONE, _REFUSED, _AGAIN = range(3)


class _Fleet:
    """The simulation: events in order of time, and of their making where times are equal."""

    def __init__(self, model: StoreModel, config: StreamConfig, requests_per_second: float, rng: random.Random) -> None:
        self._model = model
        self._config = config
        self._store = _Store(requests_per_second)
        self._rng = rng
        self._events: list[tuple[float, int, int, _Rank, _Read]] = []
        self._made = 0
        self._nbytes = 0.0
        self.refused = 0
        self.gave_up = 0

    def start(self, nodes: int, requests_per_node: int, nbytes: float, ranks: int) -> None:
        """Have every rank begin as many reads as it may, the ranks of all nodes in no particular order."""
        self._nbytes = nbytes
        processes = []
        for node in (_Node() for _ in range(nodes)):
            for number in range(ranks):
                left = requests_per_node // ranks + (number < requests_per_node % ranks)
                processes.append(_Rank(node, left, self._config.concurrency))
        first = [rank for rank in processes for _ in range(min(rank.left, rank.most))]
        self._rng.shuffle(first)
        for rank in first:
            rank.left -= 1
            rank.waiting.append(_Read(0.0))
            self._admit(rank, 0.0)

    def run(self) -> float:
        """Go on until nothing is left to do; return when the last read was done."""
        last = 0.0
        while self._events:
            now, _, what, rank, read = heapq.heappop(self._events)
            if what == _AGAIN:
                rank.waiting.append(read)
            else:
                rank.in_flight -= 1
                if what == _REFUSED:
                    self._on_refused(rank, read, now)
                else:
                    last = now
                    rank.answered(self._model.first_byte_seconds)
                    if rank.left:
                        rank.left -= 1
                        rank.waiting.append(_Read(now))
            self._admit(rank, now)
        return last

    def _admit(self, rank: _Rank, now: float) -> None:
        while rank.waiting and rank.in_flight < int(rank.limit):
            rank.in_flight += 1
            read = rank.waiting.popleft()
            if self._store.takes(now):
                self._push(self._done_at(rank.node, now), _DONE, rank, read)
            else:
                self._push(now + self._model.first_byte_seconds, _REFUSED, rank, read)

    def _done_at(self, node: _Node, now: float) -> float:
        """When a body asked for `now` is there: the link brings one after the other."""
        alone = now + self._model.request_seconds(self._nbytes)
        if self._model.link_bytes_per_second is None:
            return alone
        begins = max(node.link_free_at, now + self._model.first_byte_seconds)
        node.link_free_at = begins + self._nbytes / self._model.link_bytes_per_second
        return max(alone, node.link_free_at)

    def _on_refused(self, rank: _Rank, read: _Read, now: float) -> None:
        config = self._config
        self.refused += 1
        rank.refused(now)
        read.failures += 1
        pause = self._rng.uniform(0, _longest_wait(config, read.failures))
        too_often = read.failures >= config.retry_attempts
        if not read.has_given_up and (too_often or now + pause - read.began >= config.retry_deadline_seconds):
            read.has_given_up = True
            self.gave_up += 1
        self._push(now + pause, _AGAIN, rank, read)

    def _push(self, when: float, what: int, rank: _Rank, read: _Read) -> None:
        self._made += 1
        heapq.heappush(self._events, (when, self._made, what, rank, read))
