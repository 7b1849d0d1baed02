"""The parts of the benchmark that need no vLLM: the checkpoint that it loads, what it refuses, what it computes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.benchmarks.plan_cache import (
    BLOCK,
    CONFIG,
    DEFAULT,
    KEPT,
    TRACED,
    USED,
    check_round,
    growth,
    small_layers,
    summary,
    write_checkpoint,
)
from tests.benchmarks.tables import section
from tests.benchmarks.trace_cost import LAYOUT, first_layers
from tests.sparse import DEEPSEEK_V3


def test_the_small_model_has_the_tensors_of_the_large_one() -> None:
    small, full = list(small_layers(61)), list(first_layers(61))
    assert [tensor[:2] for tensor in small] == [tensor[:2] for tensor in full]
    assert [len(shape) for _, _, shape in small] == [len(shape) for _, _, shape in full]
    assert len(small) == 90427
    assert sum(math.prod(shape) for _, _, shape in small) < 100 << 20


def test_the_small_model_is_cut_into_whole_blocks() -> None:
    shapes = {name: shape for name, _, shape in small_layers(4)}
    for name, shape in shapes.items():
        if name.endswith("_scale_inv"):
            weight = shapes[name.removesuffix("_scale_inv")]
            assert shape == tuple(size // BLOCK for size in weight), name
            cut = {"o_proj": 1, "down_proj": 1, "a_proj": None, "a_proj_with_mqa": None}
            dim = next((dim for part, dim in cut.items() if name.endswith(f"{part}.weight_scale_inv")), 0)
            assert all(size % BLOCK == 0 for size in weight), name
            assert dim is None or weight[dim] % (LAYOUT.tensor * BLOCK) == 0, name
    assert shapes["model.layers.0.self_attn.q_b_proj.weight"][0] == CONFIG["num_attention_heads"] * 2 * BLOCK
    # Layers and experts, and all that is no size, are those of the large model.
    assert {key for key in CONFIG if CONFIG[key] == DEEPSEEK_V3[key]} >= {
        "architectures",
        "first_k_dense_replace",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "topk_method",
    }


def test_the_checkpoint_is_full_of_finite_numbers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 4
    state = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        name: shape for name, _, shape in small_layers(4)
    }
    assert all(torch.isfinite(tensor.float()).all() for tensor in state.values())
    first, second = (state[f"model.layers.3.mlp.experts.{number}.up_proj.weight"] for number in (0, 1))
    assert not torch.equal(first.float(), second.float())


def a_load(cpu: float, rest: float, **changes: Any) -> dict[str, Any]:
    found = {"cpu_seconds": cpu, "trace_cpu_seconds": rest, "trace_seconds": rest, "copies": 7, "kept_bytes": 0}
    return {**found, "digest": "same", **changes}


def a_round(scale: float = 1.0) -> dict[str, dict[str, Any]]:
    return {
        TRACED: a_load(10 * scale, 4 * scale),
        KEPT: a_load(11 * scale, 5 * scale, kept_bytes=2_500_000),
        USED: a_load(5 * scale, scale),
        DEFAULT: {"cpu_seconds": 3 * scale, "digest": "same"},
    }


def test_rows_that_do_not_load_the_same_are_refused() -> None:
    check_round(a_round())
    with pytest.raises(RuntimeError, match=r"parameters differ: .*'used': 'other'"):
        check_round({**a_round(), USED: a_load(5, 1, digest="other")})
    with pytest.raises(RuntimeError, match="copies differ"):
        check_round({**a_round(), USED: a_load(5, 1, copies=6)})


def test_what_is_written_of_the_rounds() -> None:
    raw = [{"tensors": n, "files": 1, "rounds": [a_round(n / 1000), a_round(n / 500)]} for n in (1000, 9000)]
    sizes = [summary(size) for size in raw]
    assert sizes[0]["median_cpu_seconds"] == {TRACED: 15, KEPT: 16.5, USED: 7.5, DEFAULT: 4.5}
    assert sizes[1]["trace_cpu_seconds_ratio_to_traced"][USED] == {"min": 0.25, "median": 0.25, "max": 0.25}
    assert growth(sizes) == {TRACED: 1, KEPT: 1, USED: 1}
    text = section("plan_cache", {"plan_cache": {"sizes": sizes, "growth_exponents": growth(sizes), "raw": raw}})
    assert "At 9000 tensors, it takes 0.50 times the CPU" in text
    assert "| 1000 | used | 7.50 | 0.50 (0.50-0.50) | 1.50 | 0.25 (0.25-0.25) |  |" in text
    assert "| 9000 | traced and kept | 148.50 | 1.10 (1.10-1.10) | 67.50 | 1.25 (1.25-1.25) | 2.50 |" in text
