"""A tensor-parallel Llama: the whole sequence at once, no cache."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from streamer.errors import UnsupportedCheckpointError
from streamer.reference.config import LlamaConfig
from streamer.reference.layers import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from streamer.reference.module import LoadableModule
from streamer.reference.parallel import Parallel

__all__ = ["LlamaForCausalLM"]


def _rotary_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Return ``head_size / 2`` angular frequencies, float32.

    Raises:
        UnsupportedCheckpointError: a scaling other than none, linear or Llama 3's.
    """
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    plain = 1.0 / config.rope_theta**exponents
    kind = config.rope.get("rope_type", config.rope.get("type", "default"))
    if kind == "default":
        return plain
    factor = float(config.rope.get("factor", 1.0))
    if kind == "linear":
        return plain / factor
    if kind != "llama3":
        raise UnsupportedCheckpointError(f"the reference engine cannot run RoPE scaling {kind!r}")
    # Section 3.2 of https://arxiv.org/abs/2407.21783: long waves are slowed by `factor`, short ones are kept.
    low, high = float(config.rope["low_freq_factor"]), float(config.rope["high_freq_factor"])
    turns = float(config.rope["original_max_position_embeddings"]) * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * smooth + plain / factor * (1 - smooth)


def _rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


class LlamaAttention(LoadableModule):
    def __init__(self, config: LlamaConfig, parallel: Parallel) -> None:
        super().__init__()
        self._head_size = config.head_size
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_size,
            config.heads,
            config.kv_heads,
            parallel,
            bias=config.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            config.heads * config.head_size, config.hidden_size, parallel, bias=config.output_bias
        )

    def forward(self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape

        def by_head(projected: torch.Tensor) -> torch.Tensor:
            return projected.reshape(batch, length, -1, self._head_size).transpose(1, 2)

        query, key, value = map(by_head, self.qkv_proj(hidden))
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        groups = self.qkv_proj.heads // self.qkv_proj.kv_heads
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return attended


class LlamaMLP(LoadableModule):
    def __init__(self, config: LlamaConfig, parallel: Parallel) -> None:
        super().__init__()
        sizes = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, sizes, parallel, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, parallel, bias=config.mlp_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden)
        lowered: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return lowered


class LlamaLayer(LoadableModule):
    def __init__(self, config: LlamaConfig, parallel: Parallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.self_attn = LlamaAttention(config, parallel)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = LlamaMLP(config, parallel)

    def forward(self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosine, sine)
        forwarded: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + forwarded


class LlamaModel(LoadableModule):
    def __init__(self, config: LlamaConfig, parallel: Parallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocabulary, config.hidden_size, parallel)
        self.layers = nn.ModuleList(LlamaLayer(config, parallel) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)


class LlamaForCausalLM(LoadableModule):
    """The model; names of parameters follow Hugging Face's, with fused projections.

    Args:
        config: sizes.
        parallel: this rank's place; weights are its shards.
    """

    def __init__(self, config: LlamaConfig, parallel: Parallel) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, parallel)
        self.lm_head = VocabParallelHead(config.vocabulary, config.hidden_size, parallel)
        if config.tie_embeddings:
            self.lm_head.tie(self.model.embed_tokens)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``(batch, length, vocabulary)`` for token ids ``(batch, length)``.

        Raises:
            UnsupportedCheckpointError: a RoPE scaling that is not known, or a sequence longer than the
                sliding window.
        """
        length = tokens.shape[1]
        if self.config.sliding_window is not None and length > self.config.sliding_window:
            raise UnsupportedCheckpointError(
                f"the reference engine has no sliding window; {length} tokens exceed {self.config.sliding_window}"
            )
        angles = torch.outer(torch.arange(length, dtype=torch.float32), _rotary_frequencies(self.config))
        hidden = self.model.embed_tokens(tokens)
        angles = torch.cat((angles, angles), dim=-1).to(hidden.device)
        cosine, sine = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.model.layers:
            hidden = layer(hidden, cosine, sine)
        logits: torch.Tensor = self.lm_head(self.model.norm(hidden))
        return logits
