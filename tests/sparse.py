"""Checkpoints at full size that take no room: real headers, and holes in the place of data."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["DEEPSEEK_V3", "LLAMA_3_70B", "deepseek_v3", "llama_3_70b", "write_sparse"]

#: Name, dtype as in a header, shape.
Tensor = tuple[str, str, tuple[int, ...]]

_ITEMSIZE = {"BF16": 2, "F32": 4, "F8_E4M3": 1}

LLAMA_3_70B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
DEEPSEEK_V3: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    },
}


def llama_3_70b() -> Iterator[Tensor]:
    """Yield the 723 tensors of Llama-3-70B, 141,107,412,992 bytes."""
    hidden, wide, kv, words = 8192, 28672, 1024, 128256
    yield "model.embed_tokens.weight", "BF16", (words, hidden)
    for layer in range(80):
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (wide, hidden)),
            ("mlp.up_proj", (wide, hidden)),
            ("mlp.down_proj", (hidden, wide)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ):
            yield f"{prefix}{name}.weight", "BF16", shape
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (words, hidden)


def deepseek_v3() -> Iterator[Tensor]:
    """Yield the 90,427 tensors of DeepSeek-V3 without its draft layer: fp8 in blocks of 128 x 128, with scales."""
    hidden, words, heads = 7168, 129280, 128
    yield "model.embed_tokens.weight", "BF16", (words, hidden)
    for layer in range(61):
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_a_proj", (1536, hidden)),
            ("self_attn.q_b_proj", (heads * 192, 1536)),
            ("self_attn.kv_a_proj_with_mqa", (576, hidden)),
            ("self_attn.kv_b_proj", (heads * 256, 512)),
            ("self_attn.o_proj", (hidden, heads * 128)),
        ):
            yield from _in_blocks(prefix + name, shape)
        for name, size in (
            ("self_attn.q_a_layernorm", 1536),
            ("self_attn.kv_a_layernorm", 512),
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
        ):
            yield f"{prefix}{name}.weight", "BF16", (size,)
        if layer < 3:
            yield from _mlp(f"{prefix}mlp.", 18432)
            continue
        yield f"{prefix}mlp.gate.weight", "BF16", (256, hidden)
        yield f"{prefix}mlp.gate.e_score_correction_bias", "F32", (256,)
        yield from _mlp(f"{prefix}mlp.shared_experts.", 2048)
        for expert in range(256):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", 2048)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (words, hidden)


def _mlp(prefix: str, wide: int) -> Iterator[Tensor]:
    yield from _in_blocks(f"{prefix}gate_proj", (wide, 7168))
    yield from _in_blocks(f"{prefix}up_proj", (wide, 7168))
    yield from _in_blocks(f"{prefix}down_proj", (7168, wide))


def _in_blocks(name: str, shape: tuple[int, int]) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", shape
    yield f"{name}.weight_scale_inv", "F32", (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))


def write_sparse(
    folder: Path, tensors: Iterator[Tensor], config: Mapping[str, Any], *, shard_bytes: int = 5 * 10**9
) -> None:
    """Write a checkpoint of shards of about `shard_bytes`, its index and its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = [{}]
    end = 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * _ITEMSIZE[dtype]
        if end and end + nbytes > shard_bytes:
            shards.append({})
            end = 0
        shards[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map.update(dict.fromkeys(shard, file))
        header = json.dumps(shard).encode()
        with open(folder / file, "wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            stream.truncate(8 + len(header) + max(entry["data_offsets"][1] for entry in shard.values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
