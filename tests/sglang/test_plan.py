"""Plans made of SGLang's own models on meta: what they say is what loads do."""

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
from tests.sglang.cases import CASES, Case
from tests.sglang.host import load
from tests.sparse import LLAMA_3_70B, llama_3_70b, write_sparse

Get = Callable[[str], tuple[Case, Path]]

pytestmark = pytest.mark.usefixtures("registered")


def plan(folder: Path, layout: ParallelLayout, rank: int) -> DryRun:
    config = StreamConfig()
    with FetchEngine(open_source(str(folder), config), config) as engine:
        checkpoint = engine.open_checkpoint().checkpoint
    return dry_run(find_engine("sglang").build(folder, layout, rank), checkpoint, config)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plans_need_what_loads_need(checkpoint: Get, case: Case) -> None:
    _, folder = checkpoint(case.name)
    planned = plan(folder, ParallelLayout(tensor=2, experts="ep_size" in case.arguments), 1)
    report = load(folder, **case.arguments).loader.report
    assert planned.plan.needed_bytes == report.needed_bytes
    assert set(planned.ignored) == set(report.ignored)


def test_stages_hold_their_layers(checkpoint: Get) -> None:
    _, folder = checkpoint("llama")
    runs = [plan(folder, ParallelLayout(2, 2), rank) for rank in range(4)]
    layers = [{copy.tensor.split(".")[2] for copy in run.copies if ".layers." in copy.tensor} for run in runs]
    assert layers == [{"0"}, {"0"}, {"1"}, {"1"}]


def test_llama_3_70b(tmp_path: Path) -> None:
    write_sparse(tmp_path / "m", llama_3_70b(), LLAMA_3_70B)
    run = plan(tmp_path / "m", ParallelLayout(tensor=8), 3)
    assert run.plan.needed_bytes == 17_640_734_720
    assert not run.materialised
    assert len(run.copies) == 723


def test_nothing_large_has_memory(checkpoint: Get) -> None:
    _, folder = checkpoint("mixtral")
    model = find_engine("sglang").build(folder, ParallelLayout(tensor=2), 1).model
    assert not [p for p in model.parameters() if not p.is_meta and p.numel() * p.element_size() >= 1 << 16]
    assert any(parameter.is_meta for parameter in model.parameters())
    assert torch.get_default_dtype() is torch.float32


def test_the_command_line(checkpoint: Get) -> None:
    _, folder = checkpoint("llama")
    arguments = ["plan", str(folder), "--tp", "2", "--pp", "2", "--engine", "sglang", "--json", "--quiet"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["engine"], document["tp"], document["pp"]) == ("sglang", 2, 2)
    assert sum(rank["needed_bytes"] for rank in document["ranks"]) >= document["checkpoint_bytes"]
    name = "model.layers.1.self_attn.v_proj.weight"
    done = CliRunner().invoke(app, ["explain", str(folder), name, "--tp", "2", "--rank", "1", "--engine", "sglang"])
    assert "rank 1: rows 8 to 15 go to rows 40 to 47 of model.layers.1.self_attn.qkv_proj.weight" in done.stdout


def test_layouts_that_cannot_be(checkpoint: Get, tmp_path: Path) -> None:
    _, folder = checkpoint("llama")
    with pytest.raises(ConfigError, match="SGLang cannot spread this model like that"):
        plan(folder, ParallelLayout(tensor=3), 0)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        find_engine("sglang").build(tmp_path, ParallelLayout(), 0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model", "architectures": ["NoSuch"]}))
    with pytest.raises(UnsupportedCheckpointError, match="SGLang does not take"):
        find_engine("sglang").build(tmp_path, ParallelLayout(), 0)
