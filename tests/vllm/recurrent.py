"""Decoders with state-space, convolution or linear-attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.vllm.case import SMALL, Case, hub

__all__ = ["MAMBA2", "RECURRENT"]

MAMBA: Mapping[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "state_size": 16}
MAMBA2: Mapping[str, Any] = {**MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2, "expand": 2, "chunk_size": 32}
MIXER: Mapping[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
LINEAR_ATTENTION: Mapping[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
FOUR_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}

RECURRENT: tuple[Case, ...] = (
    Case(name="mamba", make=hub("mamba", **MAMBA, intermediate_size=128)),
    Case(name="mamba2", make=hub("mamba2", **MAMBA2)),
    Case(name="falcon_mamba", make=hub("falcon_mamba", **MAMBA, intermediate_size=128)),
    Case(
        name="jamba",
        make=hub(
            "jamba",
            **{**SMALL, "num_hidden_layers": 4},
            **FOUR_EXPERTS,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=16,
            mamba_expand=2,
            use_mamba_kernels=False,
        ),
    ),
    Case(
        name="granitemoehybrid",
        make=hub(
            "granitemoehybrid",
            **SMALL,
            **MIXER,
            layer_types=["mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
        ),
    ),
    Case(name="falcon_h1", make=hub("falcon_h1", **SMALL, **MIXER, mamba_d_ssm=128, head_dim=16)),
    Case(
        name="zamba2",
        make=hub(
            "zamba2",
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=256,
            mamba_d_state=16,
            n_mamba_heads=8,
            mamba_ngroups=1,
            mamba_headdim=16,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            hybrid_layer_ids=[1, 3],
            num_mem_blocks=1,
            adapter_rank=8,
            attention_hidden_size=128,
            attention_head_dim=32,
        ),
    ),
    Case(
        name="nemotron_h",
        make=hub(
            "nemotron_h",
            **{k: v for k, v in SMALL.items() if k not in {"num_hidden_layers", "max_position_embeddings"}},
            head_dim=16,
            num_hidden_layers=4,
            hybrid_override_pattern="M*-M",
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            chunk_size=32,
        ),
    ),
    Case(
        name="lfm2",
        make=hub(
            "lfm2",
            **SMALL,
            layer_types=["conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
            # Names of LiquidAI's config.json that vLLM still reads.
            patch={
                "conv_dim": 64,
                "conv_dim_out": 64,
                "block_dim": 64,
                "block_ff_dim": 128,
                "block_multiple_of": 256,
                "block_ffn_dim_multiplier": 1.0,
            },
        ),
    ),
    Case(
        name="lfm2_moe",
        make=hub(
            "lfm2_moe",
            **SMALL,
            **FOUR_EXPERTS,
            layer_types=["conv", "full_attention"],
            moe_intermediate_size=64,
            num_dense_layers=1,
        ),
    ),
    Case(
        name="qwen3_next",
        make=hub(
            "qwen3_next",
            **SMALL,
            **LINEAR_ATTENTION,
            **FOUR_EXPERTS,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
    ),
    Case(name="qwen3_5_text", make=hub("qwen3_5_text", **SMALL, **LINEAR_ATTENTION)),
)
