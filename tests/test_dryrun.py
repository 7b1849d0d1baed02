"""A dry run reads nothing and foretells exactly what a load will do."""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch

import streamer
from streamer.config import StreamConfig
from streamer.dryrun import DryRun, dry_run
from streamer.engines import RankModel
from streamer.fetch.engine import FetchEngine
from streamer.reference.config import LlamaConfig
from streamer.reference.engine import build_llama
from streamer.reference.parallel import Parallel
from streamer.sources.memory import MemorySource
from tests.benchmarks.rig import llama_config, llama_shapes
from tests.trace.loading import Model, source_of

CONFIG = llama_config(layers=2, hidden=128, wide=256, heads=8, kv_heads=4, vocabulary=250)


def plan_for(model: Any, source: MemorySource, config: StreamConfig) -> DryRun:
    with FetchEngine(source, config) as engine:
        checkpoint = engine.open_checkpoint().checkpoint
        before = source.stats.bytes_received
        planned = dry_run(RankModel(model, model.load_weights), checkpoint, config)
        assert source.stats.bytes_received == before
    return planned


def test_every_rank_loads_what_was_planned() -> None:
    state = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in llama_shapes(CONFIG).items()}
    state["rotary_emb.inv_freq"] = torch.ones(3, dtype=torch.bfloat16)
    body = safetensors.torch.save(state)
    for gap in (0, 4096, 512 << 10):
        config = StreamConfig(request_bytes=64 << 10, coalesce_gap_bytes=gap, buffer_bytes=4 << 20)
        for rank in range(4):
            parallel = Parallel(rank, 4)
            planned = plan_for(
                build_llama(LlamaConfig.from_dict(CONFIG), parallel), MemorySource({"model.safetensors": body}), config
            )
            model = build_llama(LlamaConfig.from_dict(CONFIG), parallel, load_device="cpu")
            report = streamer.load(model, MemorySource({"model.safetensors": body}), config)
            assert planned.plan.needed_bytes == report.needed_bytes
            assert planned.plan.fetch_bytes == report.fetched_bytes
            assert planned.plan.over_read_bytes == report.over_read_bytes
            assert len(planned.plan.requests) == report.requests - 1  # the header
            assert planned.ignored == report.ignored == {"rotary_emb.inv_freq": "the model passed over it"}
            assert sum(copy.nbytes for copy in planned.copies) == report.needed_bytes
            assert {copy.parameter for copy in planned.copies} == {name for name, _ in model.named_parameters()}


def test_what_a_model_keeps_is_planned() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "table":
                model.kept = tensor[:3] + torch.arange(3)
            else:
                model.b.data.copy_(tensor)

    state = {"table": torch.ones(8, dtype=torch.int64), "bias": torch.ones(4)}
    planned = plan_for(Model(loader, {"b": (4,)}), source_of(state), StreamConfig())
    report = streamer.load(Model(loader, {"b": (4,)}), source_of(state))
    assert planned.plan.needed_bytes == report.needed_bytes == 4 * 4 + 3 * 8
    assert planned.materialised == report.materialised


def test_writes_reads_and_expressions_are_followed() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "bias":
                tensor.zero_()
                model.b.data.copy_(tensor)
            if name == "scale":
                model.s.data.copy_(tensor.float().exp()[:2])
                tensor.max().item()
            if name == "cat":
                model.c.data.copy_(torch.cat([tensor[:2], tensor[6:]]))

    with torch.device("meta"):
        model = Model(loader, {"b": (4,), "s": (2,), "c": (4, 3)})
    state = {"bias": torch.ones(4), "scale": torch.ones(3), "cat": torch.ones(8, 3)}
    planned = plan_for(model, source_of(state), StreamConfig(coalesce_gap_bytes=0))
    assert {read.operation for read in planned.materialised} == {"aten::zero_", "aten::_local_scalar_dense"}
    assert {(copy.tensor, copy.parameter, copy.computed) for copy in planned.copies} == {
        ("scale", "s", True),
        ("cat", "c", True),
    }
    assert planned.plan.unique_bytes == (4 + 3 + 12) * 4
