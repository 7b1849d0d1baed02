"""Layouts other than tensor parallelism alone: the same bytes as SGLang's default loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.cases import Case
from tests.sglang.host import load
from tests.tensors import differences, tensors_of

Get = Callable[[str], tuple[Case, Path]]

pytestmark = pytest.mark.usefixtures("registered")

LAYOUTS: dict[str, dict[str, Any]] = {
    "attention of its own on every rank": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "that, and whole experts": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2},
    "attention in pairs": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True},
    "experts split and spread": {"tp_size": 4, "ep_size": 2},
    "some experts twice": {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 2},
    "stages": {"tp_size": 2, "pp_size": 2},
}

#: What a rank then holds of the attention's output projection (columns) and of the experts (how many, rows of each).
HELD = {
    "attention of its own on every rank": (128, 4, 64),
    "that, and whole experts": (128, 2, 128),
    "attention in pairs": (64, 4, 32),
    "experts split and spread": (32, 2, 64),
    "some experts twice": (64, 3, 128),
    "stages": (64, 4, 64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_bytes_are_those_of_the_default_loader(checkpoint: Get, name: str, layout: str) -> None:
    _, folder = checkpoint(name)
    arguments = LAYOUTS[layout]
    last = arguments["tp_size"] * arguments.get("pp_size", 1) - 1
    expected = tensors_of(load(folder, rank=last, load_format="auto", **arguments).model)
    loaded = load(folder, rank=last, extra={"verify": True}, **arguments)
    assert not differences(expected, tensors_of(loaded.model))
    assert not loaded.loader.report.materialised
    shapes = {name: tuple(tensor.shape) for name, tensor in loaded.model.named_parameters()}
    columns, experts, rows = HELD[layout]
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (64, columns)
    assert shapes["model.layers.1.mlp.experts.w13_weight"] == (experts, rows, 64)
