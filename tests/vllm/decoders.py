"""Decoders with attention in every layer, dense and with experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from tests.vllm.case import SMALL, Case, Checkpoint, hub

__all__ = ["DECODERS", "DEEPSEEK", "NO_AUX"]

FOUR_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
FOUR_LOCAL: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
FOUR_ROUTED: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
DEEPSEEK: Mapping[str, Any] = {
    **SMALL,
    **FOUR_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
}
# What DeepSeek's own config.json says and transformers' configuration drops; vLLM makes the routing bias by it.
NO_AUX: Mapping[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
QWEN3_MOE: Mapping[str, Any] = {
    **SMALL,
    **FOUR_EXPERTS,
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
GPT2: Mapping[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 256}
FALCON: Mapping[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
SPECIAL_TOKENS: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _with_copied_head(checkpoint: Checkpoint) -> Checkpoint:
    """Some hub checkpoints store a tied head nevertheless."""
    tensors = checkpoint.tensors
    return Checkpoint({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, checkpoint.config)


def _without_zero_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Experts that return their input have no weights on the hub; transformers stores some that nobody uses."""
    zero = re.compile(r"\.experts\.[45]\.")
    return Checkpoint({n: t for n, t in checkpoint.tensors.items() if not zero.search(n)}, checkpoint.config)


def _dbrx() -> Checkpoint:
    """DBRX left transformers; these are the names and shapes of databricks/dbrx-instruct."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (256, 64), "norm_f.weight": (64,)}
    for layer in range(2):
        experts, block = f"blocks.{layer}.ffn.experts.mlp", f"blocks.{layer}.norm_attn_norm"
        shapes |= {f"{experts}.{name}": (4 * 128, 64) for name in ("w1", "v1", "w2")}
        shapes |= {f"blocks.{layer}.ffn.router.layer.weight": (4, 64)}
        shapes |= {f"{block}.attn.Wqkv.weight": (64 + 2 * 32, 64), f"{block}.attn.out_proj.weight": (64, 64)}
        shapes |= {f"{block}.norm_1.weight": (64,), f"{block}.norm_2.weight": (64,)}
    tensors = {f"transformer.{name}": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    config = {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "vocab_size": 256,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        "torch_dtype": "bfloat16",
    }
    return Checkpoint({**tensors, "lm_head.weight": torch.randn(256, 64).bfloat16()}, config)


DENSE = (
    Case(name="llama", make=hub("llama", **SMALL)),
    Case(name="llama_sharded", make=hub("llama", **SMALL), shards=3),
    Case(name="llama_tied", make=hub("llama", **SMALL, tie_word_embeddings=True)),
    Case(name="llama_tied_dup_lmhead", make=hub("llama", _with_copied_head, **SMALL, tie_word_embeddings=True)),
    Case(name="llama_kvrep", make=hub("llama", **{**SMALL, "num_key_value_heads": 1})),
    Case(name="mistral", make=hub("mistral", **SMALL)),
    Case(name="qwen2", make=hub("qwen2", **SMALL)),
    Case(name="qwen3", make=hub("qwen3", **SMALL, head_dim=16)),
    Case(name="gemma", make=hub("gemma", **SMALL, head_dim=16)),
    Case(name="gemma2", make=hub("gemma2", **SMALL, head_dim=16)),
    Case(name="gemma3_text", make=hub("gemma3_text", **SMALL, head_dim=16, sliding_window=64)),
    Case(
        name="gemma3n_text",
        make=hub(
            "gemma3n_text",
            **SMALL,
            head_dim=16,
            vocab_size_per_layer_input=256,
            hidden_size_per_layer_input=16,
            num_kv_shared_layers=0,
            laurel_rank=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    Case(
        name="gemma4_text",
        make=hub(
            "gemma4_text",
            **SMALL,
            head_dim=16,
            global_head_dim=16,
            sliding_window=64,
            vocab_size_per_layer_input=256,
            hidden_size_per_layer_input=16,
            num_kv_shared_layers=0,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    Case(name="gpt2", make=hub("gpt2", **GPT2)),
    Case(name="gpt_neox", make=hub("gpt_neox", **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"})),
    Case(name="gptj", make=hub("gptj", **GPT2, rotary_dim=16)),
    Case(name="gpt_bigcode", make=hub("gpt_bigcode", **GPT2, multi_query=True)),
    Case(
        name="opt",
        make=hub(
            "opt",
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=256,
            max_position_embeddings=256,
        ),
    ),
    Case(name="bloom", make=hub("bloom", hidden_size=64, n_layer=2, n_head=4, vocab_size=256)),
    Case(
        name="falcon_mqa",
        make=hub("falcon", **FALCON, multi_query=True, new_decoder_architecture=False, parallel_attn=True),
    ),
    Case(name="falcon_40b", make=hub("falcon", **FALCON, num_kv_heads=2, new_decoder_architecture=True)),
    Case(
        name="falcon_rw",
        make=hub(
            "falcon",
            **FALCON,
            multi_query=False,
            new_decoder_architecture=False,
            alibi=True,
            bias=True,
            parallel_attn=False,
        ),
    ),
    Case(name="phi", make=hub("phi", **SMALL)),
    Case(name="phi3", make=hub("phi3", **SMALL, pad_token_id=0)),
    Case(name="starcoder2", make=hub("starcoder2", **SMALL)),
    Case(name="stablelm", make=hub("stablelm", **SMALL)),
    Case(name="olmo2", make=hub("olmo2", **SMALL)),
    Case(name="cohere", make=hub("cohere", **SMALL)),
    Case(name="cohere2", make=hub("cohere2", **SMALL, head_dim=16)),
    Case(name="granite", make=hub("granite", **SMALL)),
    Case(name="nemotron", make=hub("nemotron", **SMALL)),
    Case(name="glm4", make=hub("glm4", **SMALL, head_dim=16, pad_token_id=0)),
    Case(name="ernie4_5", make=hub("ernie4_5", **SMALL)),
    Case(name="exaone4", make=hub("exaone4", **SMALL, sliding_window=64, sliding_window_pattern=4)),
    Case(name="smollm3", make=hub("smollm3", **SMALL, **SPECIAL_TOKENS)),
    Case(name="seed_oss", make=hub("seed_oss", **SMALL, head_dim=16)),
    Case(name="arcee", make=hub("arcee", **SMALL)),
    Case(name="apertus", make=hub("apertus", **SMALL, pad_token_id=0)),
)

MIXTURES = (
    Case(name="qwen3_moe", make=hub("qwen3_moe", **QWEN3_MOE)),
    Case(name="qwen3_moe_ep", make=hub("qwen3_moe", **QWEN3_MOE), experts=True),
    Case(
        name="qwen2_moe",
        make=hub(
            "qwen2_moe",
            **SMALL,
            **FOUR_EXPERTS,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
        ),
    ),
    Case(name="mixtral", make=hub("mixtral", **SMALL, **FOUR_LOCAL)),
    Case(name="mixtral_sharded_ep", make=hub("mixtral", **SMALL, **FOUR_LOCAL), shards=4, experts=True),
    Case(name="phimoe", make=hub("phimoe", **SMALL, **FOUR_LOCAL)),
    Case(name="olmoe", make=hub("olmoe", **SMALL, **FOUR_EXPERTS)),
    Case(name="granitemoe", make=hub("granitemoe", **SMALL, **FOUR_LOCAL)),
    Case(name="granitemoeshared", make=hub("granitemoeshared", **SMALL, **FOUR_LOCAL, shared_intermediate_size=64)),
    Case(name="deepseek_v2", make=hub("deepseek_v2", **{**DEEPSEEK, "q_lora_rank": None})),
    Case(name="deepseek_v3", make=hub("deepseek_v3", **DEEPSEEK, patch=NO_AUX)),
    Case(name="kimi_k2", make=hub("deepseek_v3", **DEEPSEEK, patch={**NO_AUX, "model_type": "kimi_k2"})),
    Case(name="glm4_moe_lite", make=hub("glm4_moe_lite", **DEEPSEEK, patch=NO_AUX)),
    Case(name="glm4_moe", make=hub("glm4_moe", **SMALL, **FOUR_ROUTED, head_dim=16, n_group=1, topk_group=1)),
    Case(name="gpt_oss", make=hub("gpt_oss", **SMALL, **FOUR_LOCAL, head_dim=16)),
    Case(
        name="minimax_m2",
        make=hub(
            "minimax_m2",
            **SMALL,
            **FOUR_LOCAL,
            head_dim=16,
            patch={"rotary_dim": 8, "scoring_func": "sigmoid", "use_routing_bias": True},
        ),
    ),
    Case(
        name="ernie4_5_moe",
        make=hub(
            "ernie4_5_moe",
            **SMALL,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=64,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=1,
        ),
    ),
    Case(
        name="hunyuan_v1_moe",
        make=hub("hunyuan_v1_moe", **SMALL, head_dim=16, num_experts=4, moe_topk=2, pad_token_id=0),
    ),
    Case(
        name="longcat_flash",
        make=hub(
            "longcat_flash",
            _without_zero_experts,
            **{k: v for k, v in DEEPSEEK.items() if k not in FOUR_ROUTED and k not in {"n_group", "topk_group"}},
            num_layers=1,
            n_routed_experts=4,
            ffn_hidden_size=128,
            expert_ffn_hidden_size=64,
            moe_topk=2,
            zero_expert_num=2,
            patch={"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
        ),
    ),
    Case(
        name="dbrx",
        make=_dbrx,
        unsupported="vLLM's load_weights looks for experts.w13_weight, which is now experts.routed_experts.w13_weight",
    ),
)

DECODERS: tuple[Case, ...] = (*DENSE, *MIXTURES)
