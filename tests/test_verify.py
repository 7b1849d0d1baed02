"""A verification reads the sources again and notices whatever a load got wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import safetensors.torch
import torch

import streamer
from streamer.checkpoint.checkpoint import TensorInfo
from streamer.errors import VerificationError
from streamer.fetch import engine as fetch_engine
from streamer.report import LoadReport
from streamer.sources.base import ObjectInfo
from streamer.sources.memory import MemorySource
from tests.trace.loading import Model

STATE = {
    "q": torch.randn(96, 64),
    "k": torch.randn(32, 64),
    "row": torch.randn(64, 256),
    "cast": torch.randn(64, 64, dtype=torch.bfloat16),
    "bias": torch.randn(64),
    "scalar": torch.randn(()),
    "turned": torch.randn(64, 96),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "qk": (128, 64),
    "row": (64, 128),
    "cast": (64, 64),
    "joined": (128, 64),
    "bias": (64,),
    "scalar": (),
    "turned": (96, 64),
}


def fuse(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    held = dict(weights)
    model.qk[:96].copy_(held["q"])
    model.qk[96:].copy_(held["k"])
    model.row.copy_(held["row"][:, 128:])
    model.cast.copy_(held["cast"])
    model.joined.copy_(torch.cat([held["q"], held["k"]]))
    model.bias.copy_(held["bias"])
    model.scalar.copy_(held["scalar"])
    model.turned.copy_(held["turned"].t())


class Flipping(MemorySource):
    """Gives wrong bytes for one range, once: in a load, not when it is read again."""

    def __init__(self, body: bytes, at: int) -> None:
        super().__init__({"model.safetensors": body})
        self._at = at
        self._first = 8 + int.from_bytes(body[:8], "little")  # of the data; headers are read in peace
        self.flipped = False

    async def read_into(self, item: ObjectInfo, start: int, buffers: Sequence[memoryview]) -> None:
        await super().read_into(item, start, buffers)
        for buffer in buffers:
            if not self.flipped and start >= self._first and start <= self._at < start + len(buffer):
                buffer[self._at - start] ^= 0xFF
                self.flipped = True
            start += len(buffer)


def load(source: Any, loader: Callable[..., Any] = fuse, **options: Any) -> LoadReport:
    options = {"verify": True, "header_read_bytes": 1000, **options}
    return streamer.load(Model(loader, SHAPES), source, options)


def body() -> bytes:
    return safetensors.torch.save(STATE)


@pytest.mark.parametrize("buffer_bytes", [4 << 20, 64 << 10])
def test_a_right_load_passes(buffer_bytes: int) -> None:
    report = load(MemorySource({"model.safetensors": body()}), buffer_bytes=buffer_bytes)
    assert report.verified is not None
    assert report.verified.copies == report.copies == 8
    assert report.verified.nbytes > 1000
    assert not report.verified.replaced + report.verified.overwritten + report.verified.skipped


def test_what_it_computes_again_is_not_what_the_model_needed() -> None:
    source = {"model.safetensors": body()}
    plain, verified = (load(MemorySource(source), verify=verify) for verify in (False, True))
    assert verified.needed_bytes == plain.needed_bytes
    assert verified.over_read_bytes == plain.over_read_bytes


def test_without_it_nothing_is_read_again() -> None:
    assert load(MemorySource({"model.safetensors": body()}), verify=False).verified is None


@pytest.mark.parametrize(
    ("name", "parameter"), [("k", "qk"), ("row", "row"), ("cast", "cast"), ("bias", "bias"), ("turned", "turned")]
)
def test_a_flipped_byte_is_found_and_named(name: str, parameter: str) -> None:
    content = body()
    info = tensors_in(content)[name]
    # The last byte is the sign and exponent of the last element, which is part of every sample.
    source = Flipping(content, info.end - 1)
    with pytest.raises(VerificationError, match=rf"^{parameter} holds .* of a copy from .*{name}"):
        load(source, coalesce_gap_bytes=0)
    assert source.flipped


def tensors_in(content: bytes) -> Mapping[str, TensorInfo]:
    with fetch_engine.FetchEngine(MemorySource({"model.safetensors": content}), streamer.StreamConfig()) as engine:
        return engine.open_checkpoint().checkpoint.tensors


def test_bytes_put_in_the_wrong_place_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = fetch_engine.FetchEngine.fill

    def shifted(self: Any, jobs: Any, *rest: Any) -> Any:
        plan = fill(self, jobs, *rest)
        for job in jobs:
            if job.destination.shape == (32, 64):
                job.destination.copy_(job.destination.roll(1, 0).clone())
        return plan

    monkeypatch.setattr(fetch_engine.FetchEngine, "fill", shifted)
    with pytest.raises(VerificationError, match=r"qk holds .* from k should be"):
        load(MemorySource({"model.safetensors": body()}))


def test_what_the_model_changes_afterwards_is_left_out() -> None:
    def negate(model: Any, weights: Any) -> None:
        fuse(model, weights)
        model.row.neg_()
        model.cast[3:5].zero_()
        model.bias = torch.nn.Parameter(torch.zeros(64), requires_grad=False)

    report = load(MemorySource({"model.safetensors": body()}), negate, strict=False)
    assert report.verified is not None
    assert (report.verified.copies, report.verified.overwritten, report.verified.replaced) == (5, 2, 1)


def test_eager_loads_have_nothing_to_compare() -> None:
    report = load(MemorySource({"model.safetensors": body()}), mode="eager")
    assert report.verified is not None
    assert (report.copies, report.verified.copies) == (0, 0)
