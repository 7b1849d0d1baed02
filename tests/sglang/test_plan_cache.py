"""Restarts that trace nothing: the model holds what the traced load gave it, on rank 1 of 2, in every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.report import PlanCacheUse
from tests.sglang.cases import CASES, Case
from tests.sglang.host import Loaded, load
from tests.tensors import differences, tensors_of

Get = Callable[[str], tuple[Case, Path]]

pytestmark = pytest.mark.usefixtures("registered")

#: Families whose code does what a plan cannot say: DeepSeek's takes apart what it has loaded (``post_load_weights``).
NOT_KEPT = {
    "deepseek_v2": "its code looks at values of the model by aten::clone",
    "deepseek_v3": "its code looks at values of the model by aten::clone",
    "falcon_h1": "its code writes to the model by aten::copy_",
    "gpt_oss": "its code looks at values of the checkpoint: aten::zero_",
}
KEPT, USED = PlanCacheUse("kept", ""), PlanCacheUse("used", "")


def run(checkpoint: Get, name: str, cache: Path, **more: Any) -> Loaded:
    case, folder = checkpoint(name)
    extra = {"plan_cache": True, "cache_dir": str(cache), "verify": True}
    return load(folder, extra=extra, **{**case.arguments, **more})


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_restart_loads_the_same_bytes(checkpoint: Get, tmp_path: Path, name: str) -> None:
    traced = run(checkpoint, name, tmp_path)
    if name in NOT_KEPT:
        assert traced.loader.report.plan_cache == PlanCacheUse("not used", NOT_KEPT[name])
        return
    assert traced.loader.report.plan_cache == KEPT
    run(checkpoint, name, tmp_path)  # rotary embeddings are the process's, and in evaluation mode from now on
    again = run(checkpoint, name, tmp_path)
    assert again.loader.report.plan_cache == USED
    assert not differences(tensors_of(traced.model), tensors_of(again.model))
    for field in ("expected", "loaded", "ignored", "copies", "casts", "needed_bytes"):
        assert getattr(again.loader.report, field) == getattr(traced.loader.report, field), field


@pytest.mark.parametrize("what", ["engine's version", "rank", "layout", "environment", "argument"])
def test_another_engine_or_layout_is_traced(
    checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    import sglang

    for _ in range(2):
        run(checkpoint, "llama", tmp_path)
    assert run(checkpoint, "llama", tmp_path).loader.report.plan_cache == USED
    assert run(checkpoint, "llama", tmp_path, random_seed=7, port=31000).loader.report.plan_cache == USED
    more: dict[str, Any] = {}
    if what == "engine's version":
        monkeypatch.setattr(sglang, "__version__", "0.0.1")
    elif what == "rank":
        more = {"rank": 0}
    elif what == "layout":
        more = {"rank": 0, "tp_size": 1}
    elif what == "environment":
        monkeypatch.setenv("SGLANG_MOE_PADDING", "1")
    else:
        more = {"kv_cache_dtype": "fp8_e5m2"}
    assert run(checkpoint, "llama", tmp_path, **more).loader.report.plan_cache == KEPT


def test_secrets_are_no_part_of_what_is_kept(checkpoint: Get, tmp_path: Path) -> None:
    from sglang_s3stream.circumstances import circumstances_of_sglang
    from sglang_s3stream.parallel import pretend
    from tests.sglang.host import server_arguments

    _, folder = checkpoint("llama")
    secret = "not to be told"
    with pretend(server_arguments(folder, api_key=secret, admin_api_key=secret), rank=0):
        facts = circumstances_of_sglang().facts
    assert facts["--quantization"] == "None"
    assert facts["tp_rank"] == "0"
    assert not [name for name, value in facts.items() if secret in value]
