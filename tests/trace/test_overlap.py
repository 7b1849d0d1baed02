"""What was traced is fetched while the trace goes on, and nobody can tell."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import safetensors.torch
import torch

import streamer
from streamer.errors import SourceUnavailableError
from streamer.sources.base import ObjectInfo
from streamer.sources.memory import MemorySource
from tests.trace.loading import Model

STATE = {name: torch.arange(number, number + 4096.0).reshape(64, 64) for number, name in enumerate("abcdef")}
SHAPES = dict.fromkeys(STATE, (64, 64))

Weights = Iterable[tuple[str, torch.Tensor]]


class GatedSource(MemorySource):
    """Weights, but not the header, arrive when the gate is open; then they may be refused, once if that `mends` it."""

    def __init__(self, refuses: bool = False, mends: bool = False) -> None:
        super().__init__({"model.safetensors": safetensors.torch.save(STATE)})
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self._refuses, self._mends = refuses, mends
        self.writes = 0

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        if start:
            self.waiting.set()
            while not self.gate.is_set():
                await asyncio.sleep(0.001)
            if self._refuses:
                self._refuses = not self._mends
                raise SourceUnavailableError("the store is gone")
            self.writes += 1
        await super().read_into(item, start, buffers)


def load(source: GatedSource, load_weights: Callable[[Any, Weights], Any], **options: Any) -> Any:
    model = Model(load_weights, SHAPES)
    options = {"overlap_tensors": 2, "header_read_bytes": 4096, "coalesce_gap_bytes": 0, **options}
    streamer.load(model, source, options)
    return model


def no_threads_are_left() -> bool:
    return not any(thread.name.startswith("s3stream") for thread in threading.enumerate())


def check(model: Any) -> None:
    for name, value in STATE.items():
        assert torch.equal(getattr(model, name), value), name
    assert no_threads_are_left()


def test_the_trace_goes_on_while_bytes_are_fetched() -> None:
    """Nothing arrives before the model has seen the fourth tensor, of which two and two are fetched at once."""
    source = GatedSource()
    seen = []

    def load_weights(model: Any, weights: Weights) -> None:
        for name, tensor in weights:
            seen.append(name)
            if name == "d":
                assert source.waiting.wait(10), "nothing was asked for"
                source.gate.set()
            getattr(model, name).data.copy_(tensor)

    check(load(source, load_weights))
    assert seen == list(STATE)


def test_whoever_looks_at_what_is_under_way_waits_for_it() -> None:
    source = GatedSource()
    found = []

    def load_weights(model: Any, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "d":
                assert not source.gate.is_set()
                threading.Timer(0.1, source.gate.set).start()
                found.append(model.a.sum().item())
            getattr(model, name).data.copy_(tensor)

    check(load(source, load_weights))
    assert found == [STATE["a"].sum().item()]


def test_a_later_copy_wins_over_one_that_is_under_way() -> None:
    source = GatedSource()

    def load_weights(model: Any, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "d":
                threading.Timer(0.1, source.gate.set).start()
                model.a.data.copy_(tensor)  # replaces, were it not under way
                model.b.data[3:].fill_(7)
            getattr(model, name).data.copy_(tensor)

    model = load(source, load_weights)
    assert torch.equal(model.a, STATE["d"])
    assert torch.equal(model.b[:3], STATE["b"][:3])
    assert torch.equal(model.b[3:], torch.full((61, 64), 7.0))


def test_values_that_are_computed_wait_for_the_end() -> None:
    source = GatedSource()
    source.gate.set()

    def load_weights(model: Any, weights: Weights) -> None:
        for name, tensor in weights:
            getattr(model, name).data.copy_(tensor * 2 if name in "ae" else tensor)

    model = load(source, load_weights)
    for name, value in STATE.items():
        assert torch.equal(getattr(model, name), value * (2 if name in "ae" else 1)), name


def test_a_read_in_between_does_not_wait_for_buffers_that_are_under_way() -> None:
    """Two streams share one buffer of the size of a request."""
    source = GatedSource()
    source.gate.set()

    def load_weights(model: Any, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "d":
                assert tensor.t()[1, 2].item() == STATE["d"][2, 1].item()
            getattr(model, name).data.copy_(tensor.t())

    model = load(source, load_weights, buffer_bytes="64KiB")
    for name, value in STATE.items():
        assert torch.equal(getattr(model, name), value.t()), name


def test_an_error_ends_the_load_soon() -> None:
    source = GatedSource(refuses=True)
    source.gate.set()
    seen = []

    def load_weights(model: Any, weights: Weights) -> None:
        for name, tensor in weights:
            seen.append(name)
            getattr(model, name).data.copy_(tensor)
            time.sleep(0.2 if name == "c" else 0)

    with pytest.raises(SourceUnavailableError, match="the store is gone"):
        load(source, load_weights)
    assert seen[-1] in "bc"  # the second was handed out when the first was fetched, which may take a while
    assert no_threads_are_left()


def test_model_code_that_fails_leaves_nothing_under_way() -> None:
    """Memory that was the model's is not written to afterwards."""
    source = GatedSource()

    def load_weights(model: Any, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "d":
                assert source.waiting.wait(10)
                raise KeyError("no such layer")
            getattr(model, name).data.copy_(tensor)

    model = Model(load_weights, SHAPES)
    with pytest.raises(KeyError, match="no such layer"):
        streamer.load(model, source, {"overlap_tensors": 2, "header_read_bytes": 4096})
    assert no_threads_are_left()
    source.gate.set()
    time.sleep(0.05)
    assert source.writes == 0
    assert all((getattr(model, name) == -1).all() for name in STATE)


def test_times_add_up() -> None:
    source = GatedSource()

    def load_weights(model: Any, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "d":
                time.sleep(0.2)
                source.gate.set()
            getattr(model, name).data.copy_(tensor)

    report = streamer.load(Model(load_weights, SHAPES), source, {"overlap_tensors": 2, "header_read_bytes": 4096})
    times = report.times
    assert times.trace >= 0.2
    assert times.headers + times.trace + times.plan + times.fetch + times.copy == pytest.approx(times.total, abs=0.05)
    assert report.needed_bytes == report.fetched_bytes == sum(value.nbytes for value in STATE.values())


@pytest.mark.parametrize("overlap_tensors", [0, 2])
def test_model_code_that_catches_the_error_does_not_hide_it(overlap_tensors: int) -> None:
    """It cannot know which of its parameters are right, whatever is read afterwards."""
    source = GatedSource(refuses=True, mends=True)
    source.gate.set()

    def load_weights(model: Any, weights: Weights) -> None:
        iterator = iter(weights)
        for name in "abc":
            getattr(model, name).data.copy_(next(iterator)[1])
        with contextlib.suppress(SourceUnavailableError):
            model.a.sum()

    with pytest.raises(SourceUnavailableError, match="the store is gone"):
        load(source, load_weights, overlap_tensors=overlap_tensors, strict=False)
    assert no_threads_are_left()
