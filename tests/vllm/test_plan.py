"""Plans made of vLLM's own models on meta: what they say is what loads do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from streamer.cli.app import app
from streamer.config import StreamConfig
from streamer.dryrun import DryRun, dry_run
from streamer.engines import ParallelLayout, find_engine
from streamer.errors import CheckpointError, ConfigError, UnsupportedCheckpointError
from streamer.fetch.engine import FetchEngine
from streamer.sources import open_source
from tests.sparse import DEEPSEEK_V3, LLAMA_3_70B, deepseek_v3, llama_3_70b, write_sparse
from tests.vllm.cases import CASES, Case
from tests.vllm.host import build
from tests.vllm.test_census import load_ours

Get = Callable[[str], tuple[Case, Path]]

#: Those that a command line can ask for: nothing but the folder.
PLAIN = [case.name for case in CASES if case.unsupported is None and not case.engine and not case.experts]


@pytest.fixture(autouse=True)
def gates(gated_layers: None) -> None:
    """Models are inspected in this process, which is faster."""


def plan(folder: Path, layout: ParallelLayout, rank: int) -> DryRun:
    config = StreamConfig()
    with FetchEngine(open_source(str(folder), config), config) as engine:
        checkpoint = engine.open_checkpoint().checkpoint
    return dry_run(find_engine("vllm").build(folder, layout, rank), checkpoint, config)


@pytest.mark.parametrize("name", PLAIN)
def test_plans_need_what_loads_need(checkpoint: Get, name: str) -> None:
    case, folder = checkpoint(name)
    planned = plan(folder, ParallelLayout(tensor=2), 1)
    loaded = load_ours(build(folder, case, tensor=2, rank=1))
    assert planned.plan.needed_bytes == loaded.needed_bytes
    assert set(planned.ignored) == set(loaded.ignored)


def test_whole_experts_go_to_one_rank(checkpoint: Get) -> None:
    _, folder = checkpoint("qwen3_moe")
    split, whole = ({rank: plan(folder, ParallelLayout(2, 1, ep), rank) for rank in (0, 1)} for ep in (False, True))
    expert = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert [copy.nbytes for copy in split[1].copies if copy.tensor == expert] == [64 * 64]
    assert [copy.nbytes for copy in whole[1].copies if copy.tensor == expert] == [2 * 64 * 64]
    assert expert in whole[0].ignored


def test_stages_hold_their_layers(checkpoint: Get) -> None:
    _, folder = checkpoint("llama")
    runs = [plan(folder, ParallelLayout(2, 2), rank) for rank in range(4)]
    layers = [{copy.tensor.split(".")[2] for copy in run.copies if ".layers." in copy.tensor} for run in runs]
    assert layers == [{"0"}, {"0"}, {"1"}, {"1"}]
    assert ["lm_head.weight" in run.ignored for run in runs] == [True, True, False, False]


def test_llama_3_70b(tmp_path: Path) -> None:
    write_sparse(tmp_path / "m", llama_3_70b(), LLAMA_3_70B)
    run = plan(tmp_path / "m", ParallelLayout(tensor=8), 3)
    assert run.plan.needed_bytes == 17_640_734_720
    assert not run.materialised
    assert len(run.copies) == 723
    (copy,) = [copy for copy in run.copies if copy.tensor == "model.layers.40.self_attn.k_proj.weight"]
    assert (copy.parameter, copy.source, copy.destination) == (
        "model.layers.40.self_attn.qkv_proj.weight",
        ((384, 512), (0, 8192)),
        ((1024, 1152), (0, 8192)),
    )


def test_deepseek_v3(tmp_path: Path) -> None:
    write_sparse(tmp_path / "m", deepseek_v3(), DEEPSEEK_V3)
    run = plan(tmp_path / "m", ParallelLayout(tensor=8), 3)
    assert len(run.copies) == 90_427
    assert run.plan.needed_bytes / 673_150_611_808 == pytest.approx(0.1265, abs=5e-5)
    assert not run.materialised
    assert not run.ignored


def test_nothing_large_has_memory(checkpoint: Get) -> None:
    _, folder = checkpoint("mixtral")
    model = find_engine("vllm").build(folder, ParallelLayout(tensor=2), 1).model
    real = [p for p in model.parameters() if not p.is_meta and p.numel() * p.element_size() >= 1 << 16]
    assert not real
    assert any(parameter.is_meta for parameter in model.parameters())
    assert torch.get_default_dtype() is torch.float32


def test_the_command_line(checkpoint: Get) -> None:
    _, folder = checkpoint("llama_sharded")
    arguments = ["plan", str(folder), "--tp", "2", "--pp", "2", "--engine", "vllm", "--json", "--quiet"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["engine"], document["tp"], document["pp"]) == ("vllm", 2, 2)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    assert sum(rank["needed_bytes"] for rank in document["ranks"]) >= document["checkpoint_bytes"]
    name = "model.layers.1.self_attn.v_proj.weight"
    done = CliRunner().invoke(app, ["explain", str(folder), name, "--tp", "2", "--rank", "1", "--engine", "vllm"])
    assert "rank 1: rows 16 to 31 go to rows 48 to 63 of model.layers.1.self_attn.qkv_proj.weight" in done.stdout


def test_layouts_that_cannot_be(checkpoint: Get, tmp_path: Path) -> None:
    _, folder = checkpoint("llama")
    with pytest.raises(ConfigError, match="vLLM cannot spread this model like that"):
        plan(folder, ParallelLayout(tensor=3), 0)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        find_engine("vllm").build(tmp_path, ParallelLayout(), 0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model", "architectures": ["NoSuch"]}))
    with pytest.raises(UnsupportedCheckpointError, match="vLLM does not take"):
        find_engine("vllm").build(tmp_path, ParallelLayout(), 0)
