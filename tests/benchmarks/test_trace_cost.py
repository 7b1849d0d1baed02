"""The parts of the benchmark that need no vLLM: what it times does its work, and what it computes of that is right."""

from __future__ import annotations

from typing import Any

import torch

from streamer.config import StreamConfig
from streamer.engines import RankModel
from streamer.fetch.engine import FetchEngine
from streamer.reference.config import LlamaConfig
from streamer.reference.engine import build_llama
from streamer.reference.parallel import Parallel
from streamer.sources.memory import MemorySource
from tests.benchmarks.rig import llama_config, llama_shapes
from tests.benchmarks.trace_cost import (
    IdleDispatchMode,
    exponent,
    load_plain,
    load_planned,
    load_traced,
)
from tests.trace.loading import source_of

CONFIG = llama_config(layers=2, hidden=128, wide=256, heads=8, kv_heads=4, vocabulary=250)


def test_all_ways_of_loading_do_the_same_copies() -> None:
    state = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in llama_shapes(CONFIG).items()}
    source: MemorySource = source_of(state)
    with FetchEngine(source, StreamConfig()) as engine:
        checkpoint = engine.open_checkpoint().checkpoint
    model = build_llama(LlamaConfig.from_dict(CONFIG), Parallel(3, 4))
    target = RankModel(model, model.load_weights)
    mode: Any = IdleDispatchMode()  # type: ignore[no-untyped-call]
    load_plain(target, checkpoint, mode)
    assert mode.calls > 2 * len(state)
    assert load_traced(target, checkpoint) == load_planned(target, checkpoint) == len(state)


def test_growth_is_fitted_to_all_sizes() -> None:
    sizes = [
        {"tensors": n, "median_microseconds_per_tensor": {"linear": 7.0, "square": 0.5 * n}} for n in (100, 1000, 7000)
    ]
    assert exponent(sizes, "linear") == 1
    assert exponent(sizes, "square") == 2
