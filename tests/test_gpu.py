"""Loads into GPU memory. Deselected by default; run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

import streamer
from tests.share.together import CountingSource, LoadSessionFactory, Parameters, Rank, on_ranks
from tests.trace.loading import Weights, source_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.nn.Parameter(torch.empty(3000, 2000, device="cuda", dtype=torch.bfloat16))
        self.columns = torch.nn.Parameter(torch.empty(3000, 500, device="cuda", dtype=torch.bfloat16))
        self.cast = torch.nn.Parameter(torch.empty(700, 300, device="cuda", dtype=torch.float32))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            part = tensor[:, 1000:1500] if name == "columns" else tensor
            getattr(self, name).data.copy_(part)


@pytest.mark.parametrize("mode", ["trace", "eager"])
def test_parameters_on_a_gpu_are_bit_equal(mode: str) -> None:
    state = {
        "whole": torch.randn(3000, 2000, dtype=torch.bfloat16),
        "columns": torch.randn(3000, 2000, dtype=torch.bfloat16),
        "cast": torch.randn(700, 300, dtype=torch.bfloat16),
    }
    model = Mixed()
    report = streamer.load(model, source_of(state), {"mode": mode, "buffer_bytes": "4MiB"})
    assert torch.equal(model.whole.cpu(), state["whole"])
    assert torch.equal(model.columns.cpu(), state["columns"][:, 1000:1500])
    assert torch.equal(model.cast.cpu(), state["cast"].float())
    assert report.peak_buffer_bytes <= 4 << 20


def test_staging_buffers_are_pinned() -> None:
    import asyncio

    from streamer.fetch.buffers import BufferPool

    async def run() -> bool:
        pool = BufferPool(1 << 20)
        pool.pin_for = torch.device("cuda")
        return (await pool.acquire(1)).tensor.is_pinned()

    assert asyncio.run(run())


def test_ranks_that_share_fill_parameters_on_a_gpu() -> None:
    state = {"columns": torch.randn(1000, 2048), "rows": torch.randn(2048, 1000), "norm": torch.randn(1000)}
    objects = {"model.safetensors": safetensors.torch.save(state)}

    def part(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        dim = {"columns": 1, "rows": 0}.get(name)
        return tensor if dim is None else tensor.chunk(2, dim=dim)[rank]

    def load(rank: Rank, new_session: LoadSessionFactory) -> None:
        number = rank.group.rank

        def load_weights(weights: Weights) -> None:
            for name, tensor in weights:
                getattr(rank.model, name).copy_(part(name, tensor, number))

        shapes = {name: part(name, tensor, number).shape for name, tensor in state.items()}
        rank.model = Parameters(shapes, torch.bfloat16, load_weights).cuda()
        with new_session(rank.model) as session:
            opened = session.open(rank.source)
            session.run(load_weights, session.weights(opened))
            rank.report = session.report()

    for rank in on_ranks(2, load, lambda _: CountingSource(objects), buffer_bytes=1 << 20):
        if rank.error is not None:
            raise rank.error
        assert rank.report is not None
        assert rank.report.sharing is not None
        assert rank.report.sharing.read_by_others_bytes > 0
        for name, tensor in state.items():
            wanted = part(name, tensor, rank.group.rank).to(torch.bfloat16)
            assert torch.equal(getattr(rank.model, name).cpu(), wanted)
