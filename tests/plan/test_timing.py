"""Predicted times: small cases by hand, what can only grow, bounds, and a simulation that follows the real client."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.config import StreamConfig
from streamer.errors import ConfigError
from streamer.plan import timing
from streamer.plan.timing import Projection, StoreModel, predict_node_seconds, predict_seconds, project
from streamer.transport.climb import Climb
from streamer.transport.pressure import Pressure
from streamer.transport.retry import RetryPolicy

#: One second to the first byte, then 100 bytes per second.
SLOW = StoreModel(1.0, 100.0)
S3 = StoreModel(0.03, 90e6)
UNLIMITED = 1e9

reads = st.lists(st.integers(0, 10_000), max_size=40)
models = st.builds(StoreModel, st.floats(0, 2), st.floats(1, 1e5), st.none() | st.floats(1, 1e6))


def test_reads_go_to_the_connection_that_is_free_first() -> None:
    assert predict_seconds([100] * 4, 2, SLOW) == 4
    assert predict_seconds([100] * 5, 2, SLOW) == 6
    assert predict_seconds([300, 100, 100], 2, SLOW) == 4
    assert predict_seconds([100, 100, 300], 2, SLOW) == 6, "the long one comes last"
    assert predict_seconds([100, 100, 300], 8, SLOW) == 4
    assert predict_seconds([], 8, SLOW) == 0


def test_the_link_is_a_bound() -> None:
    assert predict_seconds([100] * 4, 4, StoreModel(1.0, 100.0, 1000.0)) == 2, "of which it needs 1.4"
    assert predict_seconds([100] * 4, 4, StoreModel(1.0, 100.0, 50.0)) == 1 + 400 / 50
    assert predict_seconds([], 4, StoreModel(1.0, 100.0, 50.0)) == 0


def test_a_node_is_done_with_its_slowest_rank_or_with_its_link() -> None:
    ranks = [[100, 100], [100, 300], [100]]
    assert predict_node_seconds(ranks, 1, SLOW) == 6
    assert predict_node_seconds(ranks, 2, SLOW) == 4
    assert predict_node_seconds(ranks, 1, StoreModel(1.0, 100.0, 70.0)) == 1 + 700 / 70
    assert predict_node_seconds([[]], 1, SLOW) == 0


@given(reads, st.integers(1, 9), models)
def test_no_faster_than_the_fluid_bound_and_no_slower_than_a_list_can_be(
    sizes: list[int], concurrency: int, model: StoreModel
) -> None:
    seconds = predict_seconds(sizes, concurrency, model)
    each = [model.request_seconds(size) for size in sizes]
    fluid = model.link_seconds(sum(sizes))
    # Graham's bound of list scheduling; https://doi.org/10.1002/j.1538-7305.1966.tb01709.x
    most = max(fluid, sum(each) / concurrency + max(each, default=0) * (1 - 1 / concurrency))
    assert max(fluid, sum(each) / concurrency, *each, 0) <= seconds * (1 + 1e-9)
    assert seconds <= most * (1 + 1e-9)


@given(reads, st.integers(1, 9), models)
def test_what_can_only_take_longer(sizes: list[int], concurrency: int, model: StoreModel) -> None:
    seconds = predict_seconds(sizes, concurrency, model) * (1 - 1e-9)
    first, rate, link = model.first_byte_seconds, model.bytes_per_second_per_connection, model.link_bytes_per_second
    assert predict_seconds([*sizes, 1], concurrency, model) >= seconds
    assert predict_seconds(sizes, concurrency, StoreModel(first + 1, rate, link)) >= seconds
    assert predict_seconds(sizes, concurrency, StoreModel(first, rate / 2, link)) >= seconds
    assert predict_seconds(sizes, concurrency, StoreModel(first, rate, (link or 1e6) / 2)) >= seconds
    assert predict_seconds(sizes, concurrency + 1, model) * (1 - 1e-9) <= seconds / (1 - 1e-9)


def test_connections_are_doubled_while_that_brings_more() -> None:
    """8 MB at 90 MB/s and 30 ms are 0.119 s: a level lasts half a second, and each of 32 brings 67 MB/s."""
    assert timing._openings(32, 128, 8e6, S3, 1) == deque([(0.5, 32), (1.0, 64)])
    assert timing._openings(32, 100, 8e6, S3, 1) == deque([(0.5, 32), (1.0, 36)])
    full = StoreModel(0.03, 90e6, 2.2e9)
    assert not timing._openings(32, 128, 8e6, full, 1), "32 come to 2.15 GB/s"
    assert timing._openings(32, 128, 8e6, StoreModel(0.03, 90e6, 4e9), 1) == deque([(0.5, 32)])
    assert not timing._openings(32, 128, 8e6, StoreModel(0.03, 90e6, 4e9), 2)
    slow = [8_000_000] * 4000
    assert predict_seconds(slow, 32, S3) == pytest.approx(4000 / 32 * S3.request_seconds(8e6))
    assert 0.25 < predict_seconds(slow, 32, S3, 128) / predict_seconds(slow, 32, S3) < 0.35
    assert predict_seconds(slow[:100], 32, S3, 128) == predict_seconds(slow[:100], 32, S3), "over before it can matter"
    assert predict_seconds(slow, 32, S3, 32) == predict_seconds(slow, 32, S3)


@pytest.mark.parametrize("link", [None, 20e9, 9e9, 4.5e9, 2.5e9])
def test_they_are_as_many_as_the_client_would_make_them(link: float | None) -> None:
    model = StoreModel(0.03, 90e6, link)
    seconds, climb, now, count = model.request_seconds(8e6), Climb(32, 128), 0.0, 0
    while now < 10:
        now += 1 / min(climb.limit / seconds, (link or math.inf) / 8e6)
        climb.note(8_000_000, now, is_full=True)
    count = 32 + sum(more for _, more in timing._openings(32, 128, 8e6, model, 1))
    assert climb.limit == count


@given(reads, st.integers(1, 9), models, st.integers(1, 40))
def test_more_connections_are_never_slower(sizes: list[int], concurrency: int, model: StoreModel, most: int) -> None:
    assert predict_seconds(sizes, concurrency, model, most) <= predict_seconds(sizes, concurrency, model) * (1 + 1e-9)


@pytest.mark.parametrize("numbers", [(-1.0, 1.0, None), (math.nan, 1.0, None), (0.0, 0.0, None), (0.0, 1.0, 0.0)])
def test_numbers_that_no_store_has(numbers: tuple[float, float, float | None]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        StoreModel(*numbers)


# -- many nodes ------------------------------------------------------------------------------------------


def test_without_a_limit_many_nodes_are_as_one() -> None:
    config = StreamConfig(concurrency=4)
    found = project(7, 30, 30 * 8_000_000, model=S3, config=config, ranks=3, requests_per_second_per_prefix=UNLIMITED)
    alone = predict_seconds([8_000_000] * 10, 4, S3)
    assert found.seconds == pytest.approx(alone)
    assert (found.nodes, found.refused, found.gave_up) == (7, 0, 0)


def test_ranks_share_the_link_of_their_node() -> None:
    model = StoreModel(0.03, 90e6, 100e6)
    found = project(
        3, 64, 64 * 8_000_000, model=model, config=StreamConfig(), ranks=2, requests_per_second_per_prefix=UNLIMITED
    )
    assert found.seconds == pytest.approx(model.link_seconds(64 * 8_000_000))


def two_nodes(**options: float) -> Projection:
    """Two reads, half a second to the first byte and as long for the rest, of a store that takes one per second."""
    config = StreamConfig(**{"concurrency": 1, "retry_first_wait_seconds": 1e-6, **options})  # type: ignore[arg-type]
    return project(2, 1, 50, model=StoreModel(0.5, 100.0), config=config, requests_per_second_per_prefix=1)


def test_a_refused_read_comes_again() -> None:
    """Asked at 0, refused at 0.5; asked again, refused at 1.0; asked again, answered at 1.5, done at 2.0."""
    found = two_nodes()
    assert found.seconds == pytest.approx(2.0, abs=1e-4)
    assert (found.nodes, found.refused, found.gave_up) == (2, 2, 0)


@pytest.mark.parametrize("option", [{"retry_attempts": 1}, {"retry_attempts": 2}, {"retry_deadline_seconds": 0.9}])
def test_a_read_that_would_give_up_is_counted_once(option: dict[str, float]) -> None:
    found = two_nodes(**option)
    assert (found.refused, found.gave_up) == (2, 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 3), st.integers(20, 500), st.integers(0, 3))
def test_no_faster_than_the_limit_allows(nodes: int, requests: int, ranks: int, limit: int, seed: int) -> None:
    found = project(
        nodes,
        requests,
        requests * 1000,
        model=StoreModel(0.01, 1e6),
        config=StreamConfig(concurrency=8),
        ranks=ranks,
        requests_per_second_per_prefix=limit,
        seed=seed,
    )
    windows = math.ceil(nodes * requests / limit) - 1  # each begins a second after the one before, at least
    assert found.seconds >= windows + 0.01
    assert bool(found.refused) >= bool(windows and nodes * ranks * 8 > limit and requests >= ranks * 8)


def test_more_nodes_take_longer_and_are_refused_more() -> None:
    found = [project(nodes, 200, 200 << 20, model=S3, config=StreamConfig()) for nodes in (8, 64, 512)]
    assert found[0] == project(8, 200, 200 << 20, model=S3, config=StreamConfig(), seed=1), "nobody is refused"
    assert found[0].refused == 0
    assert found[0].seconds < found[1].seconds < found[2].seconds
    assert found[1].refused < found[2].refused


def test_one_seed_gives_one_result() -> None:
    def run(seed: int) -> Projection:
        return project(64, 500, 500 << 20, model=S3, config=StreamConfig(), ranks=2, seed=seed)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_sample_of_the_nodes_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Projection:
        return project(32, 500, 500 << 20, model=S3, config=StreamConfig(), requests_per_second_per_prefix=600)

    whole = run()
    monkeypatch.setattr(timing, "_MOST_SIMULATED", 4 * 500)
    sample = run()
    assert sample != whole
    assert sample.nodes == 32
    assert sample.seconds == pytest.approx(whole.seconds, rel=0.2)
    assert sample.refused == pytest.approx(whole.refused, rel=0.4)


def test_simulated_ranks_press_as_the_client_does() -> None:
    now = 0.0
    config = StreamConfig(concurrency=20)
    real, simulated = Pressure(config, lambda: now), timing._Rank(timing._Node(), 0, 20)
    rng = random.Random(0)
    limits = set()
    for _ in range(3000):
        now += rng.uniform(0, 0.02)
        if rng.random() < 0.03:
            real.refused()
            simulated.refused(now)
        else:
            real.answered(0.05)
            simulated.answered(0.05)
        assert int(simulated.limit) == real.limit
        limits.add(real.limit)
    assert len(limits) > 10


def test_simulated_ranks_wait_as_the_client_does() -> None:
    config = StreamConfig(retry_first_wait_seconds=0.3, retry_longest_wait_seconds=7)
    policy = RetryPolicy.from_config(config)
    longest = RetryPolicy(policy.attempts, policy.deadline_seconds, 0.3, 7, rng=lambda low, high: high)
    for failures in range(1, 60):
        assert timing._longest_wait(config, failures) == longest.wait_seconds(failures, None)
