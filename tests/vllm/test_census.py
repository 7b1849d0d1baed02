"""Every way in which vLLM's models load weights, traced: the model holds what the default loader gives it.

``python -m pytest tests/vllm/test_census.py --census FILE`` writes one line of JSON per case and rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tensors import differences, tensors_of
from tests.vllm.cases import CASES, Case
from tests.vllm.host import Built, build, finalize, load_default, loading

Get = Callable[[str], tuple[Case, Path]]

SUPPORTED = [case.name for case in CASES if case.unsupported is None]
LAYOUTS = [(1, 0), (2, 1)]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    yield rows
    path = request.config.getoption("--census")
    if path:
        rows += [
            {"case": case.name, "tensor": None, "rank": None, "equal": None, "reason": case.unsupported}
            for case in CASES
            if case.unsupported is not None
        ]
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def load_ours(built: Built, **options: Any) -> Any:
    """Load `built` from its folder with our loader; return its report."""
    from vllm.config.load import LoadConfig

    from vllm_s3stream.loader import S3StreamLoader

    extra = {"buffer_bytes": 4 << 20, **options}
    loader = S3StreamLoader(LoadConfig(load_format="s3stream", use_tqdm_on_load=False, model_loader_extra_config=extra))
    with loading(built):
        loader.load_weights(built.model, built.model_config)
    finalize(built)
    return loader.report


def row_of(case: Case, tensor: int, rank: int, report: Any, different: list[str]) -> dict[str, Any]:
    forced = Counter(read.operation for read in report.materialised)
    return {
        "case": case.name,
        "tensor": tensor,
        "rank": rank,
        "equal": not different,
        "different": different,
        "copies": report.copies,
        "forced": dict(forced),
        "forced_bytes": sum(read.nbytes for read in report.materialised),
        "ignored": len(report.ignored),
        "needed_bytes": report.needed_bytes,
        "checkpoint_bytes": report.checkpoint_bytes,
        "ratio": round(report.needed_bytes / report.checkpoint_bytes, 4),
        "verified": report.verified.copies if report.verified else 0,
    }


@pytest.mark.parametrize(("tensor", "rank"), LAYOUTS, ids=["tp1", "tp2-rank1"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_traced_load_equals_the_default_loader(
    checkpoint: Get, table: list[dict[str, Any]], name: str, tensor: int, rank: int
) -> None:
    case, folder = checkpoint(name)
    expected = build(folder, case, tensor=tensor, rank=rank)
    load_default(expected)
    built = build(folder, case, tensor=tensor, rank=rank)
    report = load_ours(built, verify=True)
    different = differences(tensors_of(expected.model), tensors_of(built.model))
    table.append(row_of(case, tensor, rank, report, different))
    assert not different


@pytest.mark.parametrize("name", [case.name for case in CASES if case.unsupported is not None])
def test_what_is_left_out_fails_with_the_default_loader_too(checkpoint: Get, name: str) -> None:
    case, folder = checkpoint(name)
    with pytest.raises(Exception):  # noqa: B017  whatever vLLM says
        load_default(build(folder, case, tensor=1, rank=0))


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss", "deepseek_v3", "llama_online_fp8", "qwen3_moe_ep"])
def test_eager_load_equals_the_default_loader(checkpoint: Get, name: str) -> None:
    case, folder = checkpoint(name)
    expected = build(folder, case, tensor=2, rank=1)
    load_default(expected)
    built = build(folder, case, tensor=2, rank=1)
    load_ours(built, mode="eager")
    assert not differences(tensors_of(expected.model), tensors_of(built.model))


def test_dense_models_need_their_share_only(checkpoint: Get) -> None:
    """At TP=2, half of every matrix, and the norms."""
    case, folder = checkpoint("llama")
    report = load_ours(build(folder, case, tensor=2, rank=1))
    assert 0.5 <= report.needed_bytes / report.checkpoint_bytes < 0.502
    assert report.copies == 21
    assert not report.materialised
