"""What the tests of fetching for ranks share: a small Llama in a store, and what its ranks need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import streamer
from streamer.artifacts.fetch import fetch
from streamer.artifacts.fetched import Fetched
from streamer.artifacts.metadata import Mode, read_marker
from streamer.checkpoint.partial import Layout, Partial
from streamer.checkpoint.regions import Intervals
from streamer.cli.output import Output
from streamer.cli.traced import trace_ranks
from streamer.config import StreamConfig
from streamer.dryrun import dry_run
from streamer.engines import RankModel
from streamer.fetch.engine import FetchEngine
from streamer.reference.config import LlamaConfig
from streamer.reference.engine import build_llama
from streamer.reference.parallel import Parallel
from streamer.sources.memory import MemorySource
from tests.artifacts.fetching import URL, config_for
from tests.benchmarks.rig import llama_config, llama_shapes
from tests.servers.object_server import ObjectServer

MODEL = llama_config(layers=4, hidden=256, wide=1024, heads=8, kv_heads=4, vocabulary=1024)
TP = 4
#: Small against a rank's rows, so that there are holes; larger than a row, so that column slices read whole rows.
GAP = 16 << 10


def _shards() -> dict[str, bytes]:
    torch.manual_seed(11)
    state = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in llama_shapes(MODEL).items()}
    names = sorted(state)
    keys = [f"model-{number + 1:05}-of-00002.safetensors" for number in range(2)]
    halves = [{name: state[name] for name in names[number::2]} for number in range(2)]
    index = {"weight_map": {name: key for key, half in zip(keys, halves, strict=True) for name in half}}
    shards = {key: safetensors.torch.save(half) for key, half in zip(keys, halves, strict=True)}
    return {**shards, "model.safetensors.index.json": json.dumps(index).encode()}


WEIGHTS = _shards()
METADATA = {"config.json": json.dumps(MODEL).encode(), "tokenizer.json": b"words"}
ALL = {**METADATA, **WEIGHTS}
SHARDS = {key: body for key, body in WEIGHTS.items() if key.endswith(".safetensors")}
INDEX = "model.safetensors.index.json"


def put(server: ObjectServer, files: dict[str, bytes]) -> None:
    for key, body in files.items():
        server.put("models", f"org/m/{key}", body)


def options(server: ObjectServer, **more: object) -> StreamConfig:
    return config_for(server, **{"coalesce_gap_bytes": GAP, **more})


def layout_of(*ranks: int, tensor: int = TP) -> Layout:
    return Layout("reference", tensor, 1, False, ranks)


def fetch_for(
    server: ObjectServer, folder: Path, *ranks: int, mode: Mode = "weights", tensor: int = TP, **more: object
) -> Fetched:
    config = options(server, **more)
    spans = trace_ranks(URL, layout_of(*ranks, tensor=tensor), config, Output(as_json=True, quiet=True))
    return fetch(URL, folder, config, mode=mode, ranks=spans)


def partial_in(folder: Path) -> Partial:
    marker = read_marker(folder)
    assert marker is not None
    assert marker.partial is not None
    return marker.partial


def planned(*ranks: int, gap: int = GAP) -> dict[str, list[tuple[int, int]]]:
    """Return what the ranks' own plans read of each file, requests that meet joined, with the headers."""
    config = StreamConfig(coalesce_gap_bytes=gap)
    found: dict[str, Intervals] = {}
    for rank in ranks:
        with FetchEngine(MemorySource(WEIGHTS), config) as engine:
            checkpoint = engine.open_checkpoint().checkpoint
            model = build_llama(LlamaConfig.from_dict(MODEL), Parallel(rank, TP))
            plan = dry_run(RankModel(model, model.load_weights), checkpoint, config).plan
        for file in checkpoint.files:
            found.setdefault(file.key, Intervals()).add(0, file.header_bytes)
        for request in plan.requests:
            found[checkpoint.files[request.file].key].add(request.start, request.end)
    return {key: intervals.spans() for key, intervals in found.items()}


def load(url: Any, rank: int, config: StreamConfig, tensor: int = TP) -> dict[str, torch.Tensor]:
    model = build_llama(LlamaConfig.from_dict(MODEL), Parallel(rank, tensor), load_device="cpu")
    streamer.load(model, url, config)
    return dict(model.named_parameters())


def assert_loads(folder: Path, rank: int, config: StreamConfig) -> None:
    """Load from the folder, and hold every bit against a load from memory."""
    found, expected = load(str(folder), rank, config), load(MemorySource(WEIGHTS), rank, StreamConfig())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name
