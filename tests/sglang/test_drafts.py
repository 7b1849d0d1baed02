"""Draft models for speculative decoding: in the target's checkpoint, and in one of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.sglang.cases import CASES, SMALL, write_checkpoint
from tests.sglang.host import load
from tests.tensors import differences, tensors_of

pytestmark = pytest.mark.usefixtures("registered")


def with_prediction_layer(folder: Path) -> None:
    """Write a DeepSeek-V3 with the layer that predicts one token more, which Transformers leaves out."""
    write_checkpoint(next(case for case in CASES if case.name == "deepseek_v3"), folder)
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    hidden = SMALL["hidden_size"]
    layer = f"model.layers.{SMALL['num_hidden_layers']}."
    more = {
        name.replace("model.layers.1.", layer): torch.randn(tensor.shape).to(tensor.dtype)
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    more[layer + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        more[f"{layer}{name}.weight"] = torch.randn(hidden)
    for name in ("embed_tokens", "shared_head.head"):
        more[f"{layer}{name}.weight"] = torch.randn(SMALL["vocab_size"], hidden)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in more.items()}, folder / "prediction.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"].update(dict.fromkeys(more, "prediction.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def eagle3(folder: Path) -> None:
    """Write a draft of EAGLE-3's form, with a vocabulary smaller than its target's."""
    write_checkpoint(next(case for case in CASES if case.name == "llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 64}
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    hidden, wide, head = SMALL["hidden_size"], SMALL["intermediate_size"], 8
    keys = SMALL["num_key_value_heads"] * head
    shapes = {
        "midlayer.self_attn.q_proj": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, hidden),
        "midlayer.mlp.gate_proj": (wide, hidden),
        "midlayer.mlp.up_proj": (wide, hidden),
        "midlayer.mlp.down_proj": (hidden, wide),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
        "norm": (hidden,),
        "fc": (hidden, 3 * hidden),
        "lm_head": (64, hidden),
        "embed_tokens": (SMALL["vocab_size"], hidden),
    }
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    tensors["d2t"] = torch.randint(0, 100, (64,))
    tensors["t2d"] = torch.rand(SMALL["vocab_size"]) < 0.25
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("mode", ["trace", "eager"])
def test_a_draft_in_the_targets_checkpoint(tmp_path: Path, mode: str) -> None:
    with_prediction_layer(tmp_path)
    expected = load(tmp_path, load_format="auto", draft=tmp_path).model
    assert type(expected).__name__ == "DeepseekV3ForCausalLMNextN"
    loaded = load(tmp_path, extra={"mode": mode}, draft=tmp_path)
    assert not differences(tensors_of(expected), tensors_of(loaded.model))
    report = loaded.loader.report
    assert not report.materialised
    if mode == "trace":
        assert 0 < report.needed_bytes < 0.5 * report.checkpoint_bytes  # the target's layers are not read
    target = load(tmp_path, extra={"mode": mode})
    assert not differences(tensors_of(load(tmp_path, load_format="auto").model), tensors_of(target.model))


@pytest.mark.parametrize("mode", ["trace", "eager"])
def test_a_draft_of_its_own(tmp_path: Path, mode: str) -> None:
    eagle3(tmp_path)
    expected = load(tmp_path, load_format="auto", draft=tmp_path).model
    loaded = load(tmp_path, extra={"mode": mode}, draft=tmp_path)
    assert not differences(tensors_of(expected), tensors_of(loaded.model))
    # No parameter: the model keeps what it computed of a tensor.
    kept: Any = loaded.model.hot_token_id
    assert torch.equal(kept, load_file(tmp_path / "model.safetensors")["d2t"] + torch.arange(64))
    if mode == "trace":
        (read,) = loaded.loader.report.materialised
        assert read.tensors == ("d2t",)
