"""Tiny checkpoints, one for each way in which SGLang's models take their weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["CASES", "Case", "write_checkpoint"]

Tensors = dict[str, torch.Tensor]

SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Blocks of 128 must fit into half of each dimension.
WIDE: Mapping[str, Any] = {**SMALL, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
LATENT: Mapping[str, Any] = {
    **SMALL,
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 8,
}
YARN: Mapping[str, Any] = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tiny checkpoint, and how SGLang is to be asked for it.

    Attributes:
        model_type: as transformers calls it.
        config: fields of the model's configuration.
        patch: fields of ``config.json`` that transformers does not write so.
        without: those to take out of it.
        change: made to the tensors, to get forms that transformers does not write.
        arguments: of ``ServerArgs``.
    """

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    patch: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    change: Callable[[Tensors], Tensors] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _float8_blocks(tensors: Tensors) -> Tensors:
    """Make projections what DeepSeek publishes: float8 with a scale for each block of 128 x 128."""
    changed: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            changed[name] = tensor
            continue
        changed[name] = tensor.to(torch.float8_e4m3fn)
        changed[name + "_scale_inv"] = torch.rand([-(-size // 128) for size in tensor.shape])
    return changed


_FLOAT8_CONFIG = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}
_LATENT_PATCH = {"rope_theta": 10000.0, "moe_layer_freq": 1, "scoring_func": "sigmoid", "rope_scaling": YARN}

CASES = [
    Case(name="llama", model_type="llama"),
    Case(name="llama_tied", model_type="llama", config={**SMALL, "tie_word_embeddings": True}),
    Case(name="mistral", model_type="mistral"),
    Case(name="qwen2", model_type="qwen2"),
    Case(name="qwen3", model_type="qwen3", config={**SMALL, "head_dim": 16}),
    Case(name="phi3", model_type="phi3"),
    Case(name="gemma3_text", model_type="gemma3_text", config={**SMALL, "head_dim": 16}),
    Case(name="cohere2", model_type="cohere2"),
    Case(
        name="gpt2",
        model_type="gpt2",
        config={
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 8,
            "vocab_size": 256,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Case(name="qwen2_moe", model_type="qwen2_moe", config={**SMALL, **EXPERTS, "shared_expert_intermediate_size": 64}),
    Case(name="qwen3_moe", model_type="qwen3_moe", config={**SMALL, **EXPERTS, "head_dim": 16}),
    Case(
        name="qwen3_moe_whole_experts",
        model_type="qwen3_moe",
        config={**SMALL, **EXPERTS, "head_dim": 16},
        arguments={"ep_size": 2},
    ),
    Case(name="mixtral", model_type="mixtral", config={**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Case(
        name="granitemoe", model_type="granitemoe", config={**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    Case(
        name="gpt_oss",
        model_type="gpt_oss",
        config={**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    Case(
        name="glm4_moe",
        model_type="glm4_moe",
        config={
            **SMALL,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
        },
    ),
    Case(
        name="deepseek_v2",
        model_type="deepseek_v2",
        config={**LATENT, "topk_method": "greedy"},
        patch={**_LATENT_PATCH, "topk_method": "greedy"},
        without=("rope_parameters",),
    ),
    Case(
        name="deepseek_v3",
        model_type="deepseek_v3",
        config=LATENT,
        patch={**_LATENT_PATCH, "topk_method": "noaux_tc"},
        without=("rope_parameters",),
    ),
    Case(
        name="falcon_h1",
        model_type="falcon_h1",
        config={
            **SMALL,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
        },
        arguments={"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
    ),
    Case(
        name="qwen3_float8",
        model_type="qwen3",
        config={**WIDE, "head_dim": 64},
        patch=_FLOAT8_CONFIG,
        change=_float8_blocks,
    ),
    Case(
        name="qwen3_moe_float8",
        model_type="qwen3_moe",
        config={**WIDE, **EXPERTS, "moe_intermediate_size": 256, "head_dim": 64},
        patch=_FLOAT8_CONFIG,
        change=_float8_blocks,
    ),
]


def write_checkpoint(case: Case, folder: Path) -> None:
    """Write a checkpoint of random values in two files, with the names that ``save_pretrained`` writes."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    kind: Any = transformers.AutoModelForCausalLM
    kind.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    # Initial values are zeros and ones, many of them: tensors that are mixed up must show.
    tensors = {
        name: (torch.randn(t.shape) * 0.05).to(t.dtype) if t.is_floating_point() else t
        for name, t in sorted(load_file(path).items())
    }
    path.unlink()
    if case.change is not None:
        tensors = case.change(tensors)
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    document = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in document.items() if name not in case.without}
    (folder / "config.json").write_text(json.dumps({**kept, **case.patch}))
