"""Several ranks of one machine, loading together: every byte once, the same parameters, the same end."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import safetensors.torch
import torch

from streamer.errors import BadResponseError, ConfigError, LoadError, ObjectChangedError, SourceUnavailableError
from streamer.session import LoadSession
from streamer.share.node import Node
from streamer.sources.memory import MemorySource
from tests.share.together import CountingSource, LoadSessionFactory, Parameters, Rank, on_ranks

pytestmark = pytest.mark.usefixtures("nothing_is_left")

#: Rows and columns divide by 4; large enough to be cut into many reads of a small arena.
STATE = {
    "norm": torch.arange(64.0),
    "column": torch.arange(1024 * 64.0).reshape(1024, 64),
    "row": torch.arange(256 * 1024.0).reshape(256, 1024) + 0.5,
    "experts": torch.arange(8 * 64 * 64.0).reshape(8, 64, 64),
    "kv": torch.arange(32 * 64.0).reshape(32, 64) * 2,
    "cast": torch.arange(256 * 64.0, dtype=torch.float64).reshape(256, 64),
    "turned": torch.arange(256 * 512.0).reshape(256, 512),
}


def part(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What rank `rank` keeps of a tensor, by the usual schemes."""
    if name.startswith(("column", "cast")):
        return tensor.chunk(size)[rank]
    if name.startswith("row"):
        return tensor.chunk(size, dim=1)[rank]
    if name.startswith("experts"):
        return tensor.chunk(size)[rank]  # whole experts go to one rank
    if name.startswith("kv"):
        return tensor.chunk(2)[rank * 2 // size if size > 1 else 0]  # two heads, each on half of the ranks
    if name.startswith("turned"):
        return tensor.t().chunk(size)[rank]
    return tensor


def expected(state: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    return {name: part(name, tensor, rank, size).float().contiguous() for name, tensor in state.items()}


def objects_of(*states: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    if len(states) == 1:
        return {"model.safetensors": safetensors.torch.save(dict(states[0]))}
    return {
        f"model-{number + 1:05d}-of-{len(states):05d}.safetensors": safetensors.torch.save(dict(state))
        for number, state in enumerate(states)
    }


def load_plainly(
    rank: Rank, new_session: LoadSessionFactory, *, before: Callable[[str], None] = lambda name: None
) -> None:
    """Load `STATE`, or part of it, as a model's own code does."""
    number, size = rank.group.rank, rank.group.size
    shapes = {name: value.shape for name, value in expected(STATE, number, size).items()}

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            before(name)
            getattr(rank.model, name).copy_(part(name, tensor, number, size))

    rank.model = Parameters(shapes, torch.float32, load_weights)
    with new_session(rank.model) as session:
        opened = session.open(rank.source)
        session.run(load_weights, session.weights(opened))
        rank.report = session.report()


def check(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        if rank.error is not None:
            raise rank.error
        for name, value in expected(STATE, rank.group.rank, rank.group.size).items():
            assert torch.equal(getattr(rank.model, name), value), f"{name} at rank {rank.group.rank}"


def fetched(ranks: Sequence[Rank], header_bytes: int = 0) -> int:
    return sum(end - start for rank in ranks for _, start, end in rank.source.reads) - header_bytes


def header_bytes(objects: Mapping[str, bytes]) -> int:
    return sum(8 + int.from_bytes(body[:8], "little") for body in objects.values())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("buffer_bytes", [1 << 26, 256 << 10])
@pytest.mark.parametrize("overlap_tensors", [0, 1, 3])
def test_every_byte_is_fetched_once(size: int, buffer_bytes: int, overlap_tensors: int) -> None:
    objects = objects_of(STATE)
    options: dict[str, Any] = {
        "buffer_bytes": buffer_bytes,
        "header_read_bytes": header_bytes(objects),
        "overlap_tensors": overlap_tensors,
    }
    ranks = on_ranks(size, load_plainly, lambda _: CountingSource(objects), **options)
    check(ranks)
    total = sum(tensor.nbytes for tensor in STATE.values())
    assert fetched(ranks, header_bytes(objects)) == total
    reports = [rank.report for rank in ranks if rank.report]
    assert [report.needed_bytes for report in reports] == [
        sum(part(name, tensor, rank, size).nbytes for name, tensor in STATE.items()) for rank in range(size)
    ]
    for report in reports:
        assert report.sharing is not None
        assert report.sharing.ranks == size
        assert report.sharing.node_fetched_bytes == fetched(ranks)
        assert report.over_read_bytes == 0
        assert report.peak_buffer_bytes * size <= max(buffer_bytes, size * (64 << 10))
    alone = on_ranks(size, load_plainly, lambda _: CountingSource(objects), **options, share="off")
    check(alone)
    assert fetched(alone) > 1.5 * total, "this checkpoint would prove nothing"


def test_reading_is_dealt_out_evenly() -> None:
    objects = objects_of(STATE)
    ranks = on_ranks(4, load_plainly, lambda _: CountingSource(objects), header_read_bytes=header_bytes(objects))
    check(ranks)
    each = [fetched([rank]) for rank in ranks]
    assert max(each) - min(each) < 0.4 * max(each), each


@pytest.mark.parametrize("overlap_tensors", [0, 1])
def test_an_arena_of_two_slots_cannot_deadlock(overlap_tensors: int) -> None:
    """One slot for each rank, every read shared, and ranks that copy at very different speeds."""
    objects = objects_of(*({f"row{file}_{number}": torch.randn(128, 256) for number in range(4)} for file in range(3)))
    state = {name: value for body in objects.values() for name, value in safetensors.torch.load(body).items()}

    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        number = rank.group.rank
        shapes = dict.fromkeys(state, (128, 128))

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                getattr(rank.model, name).copy_(part(name, tensor, number, 2))

        rank.model = Parameters(shapes, torch.float32, load_weights)
        with new_session(rank.model) as session:
            opened = session.open(rank.source)
            session.run(load_weights, session.weights(opened))
            rank.report = session.report()

    ranks = on_ranks(
        2, load, lambda _: CountingSource(objects), buffer_bytes=128 << 10, overlap_tensors=overlap_tensors
    )
    for rank in ranks:
        if rank.error is not None:
            raise rank.error
        assert rank.report is not None
        assert rank.report.sharing is not None
        assert rank.report.sharing.arena_bytes == 128 << 10
        assert rank.report.sharing.read_for_others_bytes > 4 * (128 << 10)
        for name, value in state.items():
            assert torch.equal(getattr(rank.model, name), part(name, value, rank.group.rank, 2))


@pytest.mark.parametrize("overlap_tensors", [0, 1])
def test_other_machines_share_among_themselves(overlap_tensors: int) -> None:
    objects = objects_of(STATE)
    ranks = on_ranks(
        4,
        load_plainly,
        lambda _: CountingSource(objects),
        hosts=["a", "b", "a", "b"],
        coalesce_gap_bytes=0,
        header_read_bytes=header_bytes(objects),
        overlap_tensors=overlap_tensors,
    )
    check(ranks)
    for machine in (0, 1):
        here = [rank for rank in ranks if rank.group.rank % 2 == machine]
        union = 0
        for name, tensor in STATE.items():
            marks = torch.zeros(tensor.shape, dtype=torch.bool)
            for rank in here:
                part(name, marks, rank.group.rank, 4).fill_(True)
            union += int(marks.sum()) * tensor.element_size()
        assert fetched(here, header_bytes(objects) if machine == 0 else 0) == union
        report = here[0].report
        assert report is not None
        assert report.sharing is not None
        assert report.sharing.ranks == 2


def test_one_machine_for_each_rank_shares_nothing_and_works() -> None:
    objects = objects_of(STATE)
    ranks = on_ranks(2, load_plainly, lambda _: CountingSource(objects), hosts=["a", "b"])
    check(ranks)
    report = ranks[1].report
    assert report is not None
    assert report.sharing is not None
    assert report.sharing.ranks == 1


# -- failures ------------------------------------------------------------------------------------------------


def fail_with(error: Exception, at: Callable[[str, int], bool]) -> Callable[[str, int], Exception | None]:
    return lambda key, start: error if at(key, start) else None


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("overlap_tensors", [0, 1])
def test_a_store_that_fails_one_rank_fails_all_with_its_cause(culprit: int, overlap_tensors: int) -> None:
    objects = objects_of(STATE)

    def source(rank: int) -> CountingSource:
        fails = fail_with(SourceUnavailableError("broken", url="memory://objects/x"), lambda key, start: start > 2000)
        return CountingSource(objects, fails if rank == culprit else None)

    began = time.monotonic()
    ranks = on_ranks(3, load_plainly, source, overlap_tensors=overlap_tensors)
    assert time.monotonic() - began < 10
    for rank in ranks:
        assert isinstance(rank.error, SourceUnavailableError), rank.error
        assert "broken" in str(rank.error)
        assert (f"on rank {culprit}, " in str(rank.error)) == (rank.group.rank != culprit)


@pytest.mark.parametrize("overlap_tensors", [0, 1])
def test_ranks_that_fail_at_once_for_different_reasons_raise_the_same(overlap_tensors: int) -> None:
    objects = objects_of(STATE)
    both = threading.Barrier(2)

    def source(rank: int) -> CountingSource:
        error = BadResponseError("nonsense") if rank else SourceUnavailableError("broken")
        waited: list[int] = []

        def fails(_: str, start: int) -> Exception | None:
            if start < 2000:
                return None
            if not waited:
                waited.append(both.wait(10))  # neither has heard from the other
            return error

        return CountingSource(objects, fails)

    ranks = on_ranks(2, load_plainly, source, overlap_tensors=overlap_tensors)
    assert [type(rank.error) for rank in ranks] == [SourceUnavailableError] * 2
    assert "on rank 0, broken" in str(ranks[1].error)
    assert isinstance(ranks[1].error, SourceUnavailableError)
    assert isinstance(ranks[1].error.__cause__, BadResponseError)


@pytest.mark.parametrize("overlap_tensors", [0, 1])
def test_model_code_that_fails_on_one_rank_fails_all(overlap_tensors: int) -> None:
    objects = objects_of(STATE)

    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        def before(name: str) -> None:
            if rank.group.rank == 1 and name == "kv":
                raise KeyError("no such layer")

        load_plainly(rank, new_session, before=before)

    ranks = on_ranks(2, load, lambda _: CountingSource(objects), overlap_tensors=overlap_tensors)
    assert isinstance(ranks[1].error, KeyError)
    assert isinstance(ranks[0].error, LoadError)
    assert "on rank 1, KeyError: 'no such layer'" in str(ranks[0].error)
    assert overlap_tensors or fetched(ranks[1:]) == 0


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_cannot_open_fails_all(culprit: int) -> None:
    objects = objects_of(STATE)
    ranks = on_ranks(2, load_plainly, lambda rank: CountingSource({} if rank == culprit else objects))
    assert all(rank.error is not None for rank in ranks)
    assert f"on rank {culprit}" in str(ranks[1 - culprit].error)


def test_a_rank_that_never_comes_is_a_time_out() -> None:
    objects = objects_of(STATE)

    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        if rank.group.rank:
            load_plainly(rank, new_session)

    began = time.monotonic()
    ranks = on_ranks(2, load, lambda _: CountingSource(objects), share_timeout_seconds=0.5)
    assert time.monotonic() - began < 5
    assert isinstance(ranks[1].error, LoadError)


def test_an_object_replaced_for_one_rank_is_an_error_for_all() -> None:
    body = objects_of(STATE)
    other = objects_of({name: tensor + 1 for name, tensor in STATE.items()})
    ranks = on_ranks(2, load_plainly, lambda rank: CountingSource(other if rank else body))
    assert isinstance(ranks[1].error, ObjectChangedError)
    assert isinstance(ranks[0].error, ObjectChangedError)
    assert "on rank 1" in str(ranks[0].error)


def test_ranks_that_do_different_things_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = objects_of(STATE), objects_of(STATE)

    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        if rank.group.rank:
            rank.source._name = "elsewhere"
        load_plainly(rank, new_session)

    ranks = on_ranks(2, load, lambda rank: CountingSource(second if rank else first))
    for rank in ranks:
        assert isinstance(rank.error, LoadError)
        assert "memory://elsewhere" in str(rank.error)


# -- set-ups that cannot share ------------------------------------------------------------------------------------


def refuse_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)


def test_without_shared_memory_every_rank_reads_alone_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_shared_memory(monkeypatch)
    objects = objects_of(STATE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks = on_ranks(2, load_plainly, lambda _: CountingSource(objects))
    check(ranks)
    said = [str(warning.message) for warning in caught]
    assert len(said) == 1
    assert "Function not implemented" in said[0]


def test_share_require_makes_that_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_shared_memory(monkeypatch)
    objects = objects_of(STATE)
    ranks = on_ranks(2, load_plainly, lambda _: CountingSource(objects), share="require")
    for rank in ranks:
        assert isinstance(rank.error, LoadError)
        assert "share=require" in str(rank.error)


def test_a_rank_that_fails_while_memory_is_set_up_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Node._accept

    def fail(node: Node, *rest: Any) -> None:
        if node.place == 1:
            raise RuntimeError("no luck")
        accept(node, *rest)

    monkeypatch.setattr(Node, "_accept", fail)
    objects = objects_of(STATE)
    ranks = on_ranks(2, load_plainly, lambda _: CountingSource(objects))
    assert isinstance(ranks[1].error, RuntimeError)
    assert isinstance(ranks[0].error, LoadError)
    assert "on rank 1, RuntimeError: no luck" in str(ranks[0].error)


def test_share_require_needs_a_group_and_traced_loading() -> None:
    from streamer.config import StreamConfig

    with pytest.raises(ConfigError, match="no process group"):
        LoadSession(None, StreamConfig(share="require"))
    with pytest.raises(ConfigError, match="mode=eager contradict"):
        StreamConfig(share="require", mode="eager")


# -- what happens in the middle of a load --------------------------------------------------------------------


@pytest.mark.parametrize("overlap_tensors", [0, 1])
def test_layers_completed_in_the_middle_are_shared_however_often_each_rank_does_it(overlap_tensors: int) -> None:
    objects = objects_of(STATE)

    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        number, size = rank.group.rank, rank.group.size
        shapes = {name: value.shape for name, value in expected(STATE, number, size).items()}

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for count, (name, tensor) in enumerate(weights):
                parameter = getattr(rank.model, name)
                parameter.copy_(part(name, tensor, number, size))
                if count < 3:
                    session.complete_touching([parameter])
                    rank.notes[name] = torch.equal(parameter, part(name, STATE[name], number, size).float())

        rank.model = Parameters(shapes, torch.float32, load_weights)
        with new_session(rank.model) as session:
            opened = session.open(rank.source)
            session.run(load_weights, session.weights(opened))
            rank.report = session.report()

    ranks = on_ranks(
        2,
        load,
        lambda _: CountingSource(objects),
        header_read_bytes=header_bytes(objects),
        overlap_tensors=overlap_tensors,
    )
    check(ranks)
    assert len(ranks[0].notes) == 3
    assert all(ranks[0].notes.values())
    assert fetched(ranks, header_bytes(objects)) == sum(tensor.nbytes for tensor in STATE.values())


@pytest.mark.parametrize("overlap_tensors", [0, 1])
def test_a_rank_with_nothing_to_load_takes_part(overlap_tensors: int) -> None:
    objects = objects_of(STATE)

    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        if rank.group.rank:
            with new_session(Parameters({}, torch.float32, list)) as session:
                opened = session.open(rank.source)
                session.run(list, session.weights(opened))
                rank.report = session.report()
        else:
            load_plainly(rank, new_session)

    ranks = on_ranks(
        2,
        load,
        lambda _: CountingSource(objects),
        header_read_bytes=header_bytes(objects),
        overlap_tensors=overlap_tensors,
    )
    check(ranks[:1])
    assert ranks[1].error is None
    assert ranks[1].report is not None
    assert ranks[1].report.needed_bytes == 0


@pytest.mark.parametrize("overlap_tensors", [0, 1])
def test_reads_that_values_force_are_made_alone(overlap_tensors: int) -> None:
    objects = objects_of(STATE)

    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        number, size = rank.group.rank, rank.group.size
        shapes = {name: value.shape for name, value in expected(STATE, number, size).items()}

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                if number == 1 and name == "kv":
                    rank.notes["sum"] = float(tensor.sum())
                getattr(rank.model, name).copy_(part(name, tensor, number, size))

        rank.model = Parameters(shapes, torch.float32, load_weights)
        with new_session(rank.model) as session:
            opened = session.open(rank.source)
            session.run(load_weights, session.weights(opened))
            rank.report = session.report()

    ranks = on_ranks(2, load, lambda _: CountingSource(objects), overlap_tensors=overlap_tensors)
    check(ranks)
    assert ranks[1].notes["sum"] == float(STATE["kv"].sum())


@pytest.mark.parametrize("overlap_tensors", [0, 1])
def test_two_checkpoints_in_one_load(overlap_tensors: int) -> None:
    names = list(STATE)
    first, second = (objects_of({name: STATE[name] for name in half}) for half in (names[:3], names[3:]))

    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        number, size = rank.group.rank, rank.group.size
        shapes = {name: value.shape for name, value in expected(STATE, number, size).items()}
        other = MemorySource(second, "second")

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                getattr(rank.model, name).copy_(part(name, tensor, number, size))

        def both(session: LoadSession) -> Iterator[tuple[str, torch.Tensor]]:
            yield from session.weights(session.open(rank.source))
            yield from session.weights(session.open(other))

        rank.model = Parameters(shapes, torch.float32, load_weights)
        with new_session(rank.model) as session:
            session.run(load_weights, both(session))
            rank.report = session.report()

    check(on_ranks(2, load, lambda _: CountingSource(first), overlap_tensors=overlap_tensors))
