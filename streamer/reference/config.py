"""The parts of a Hugging Face ``config.json`` that a Llama needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamer.errors import ConfigError, UnsupportedCheckpointError

__all__ = ["LlamaConfig"]

#: Architectures that are a Llama, give or take biases.
_MODEL_TYPES = ("llama", "mistral", "qwen2")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """A Llama's sizes. `rope` is the ``rope_parameters`` (or older ``rope_scaling``) section."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    norm_epsilon: float
    rope_theta: float
    rope: Mapping[str, Any]
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    dtype: str

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> LlamaConfig:
        """Read a parsed ``config.json``.

        Raises:
            UnsupportedCheckpointError: another architecture.
            ConfigError: a size is missing or is not a positive number.
        """
        kind = document.get("model_type")
        if kind not in _MODEL_TYPES:
            raise UnsupportedCheckpointError(
                f"the reference engine does not know model_type {kind!r}",
                hint=f"it knows {', '.join(_MODEL_TYPES)}; for others use --engine vllm or sglang",
            )
        if document.get("hidden_act", "silu") != "silu":
            raise UnsupportedCheckpointError(f"the reference engine does not know {document['hidden_act']!r}")
        heads, hidden = _size(document, "num_attention_heads"), _size(document, "hidden_size")
        # Transformers 5 moved theta and scaling into one section; 4 had them apart.
        rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(f"config.json gives the rotary embedding as {rope!r}, not an object")
        attention_bias = bool(document.get("attention_bias", False))
        uses_window = document.get("sliding_window") and (kind != "qwen2" or document.get("use_sliding_window", False))
        return cls(
            hidden_size=hidden,
            intermediate_size=_size(document, "intermediate_size"),
            layers=_size(document, "num_hidden_layers"),
            heads=heads,
            kv_heads=_size(document, "num_key_value_heads", heads),
            head_size=_size(document, "head_dim", hidden // heads),
            vocabulary=_size(document, "vocab_size"),
            norm_epsilon=_number(document, "rms_norm_eps", 1e-6),
            rope_theta=_number(rope, "rope_theta", _number(document, "rope_theta", 10000.0)),
            rope=rope,
            tie_embeddings=bool(document.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or kind == "qwen2",
            output_bias=attention_bias,
            mlp_bias=bool(document.get("mlp_bias", False)),
            sliding_window=_size(document, "sliding_window")
            if uses_window and document.get("sliding_window")
            else None,
            dtype=str(document.get("dtype") or document.get("torch_dtype") or "float32"),
        )


def _number(document: Mapping[str, Any], key: str, default: float) -> float:
    value = document.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json gives {key} as {value!r}, not a positive number")
    return float(value)


def _size(document: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = document.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value <= 0:
        raise ConfigError(f"config.json gives {key} as {value!r}, not a positive number")
    return value
