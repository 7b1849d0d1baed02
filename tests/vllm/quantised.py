"""Quantised checkpoints, made from the names of plain ones; and plain ones that vLLM quantises while it loads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.vllm.case import WIDE, Case, Change, Checkpoint, Tensors, hub
from tests.vllm.decoders import DEEPSEEK, NO_AUX
from tests.vllm.recurrent import MAMBA2

__all__ = ["QUANTISED"]

LINEAR = re.compile(r"\b([qkvo]_proj|(gate|up|down)_proj|q_[ab]_proj|kv_b_proj|kv_a_proj_with_mqa|w[123])\.weight$")
BLOCK = 128

MIXTRAL: Mapping[str, Any] = {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE: Mapping[str, Any] = {
    **WIDE,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
WIDE_DEEPSEEK: Mapping[str, Any] = {
    **DEEPSEEK,
    **WIDE,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "moe_intermediate_size": 256,
}


def _float8(shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def _packed(*shape: int) -> torch.Tensor:
    """Return random 32-bit words, each of eight 4-bit numbers."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _quantise(method: Mapping[str, Any], linear: Callable[[str, torch.Tensor], Tensors], **config: Any) -> Change:
    """Return a change that puts ``linear(name, weight)`` in the place of every linear weight."""

    def change(checkpoint: Checkpoint) -> Checkpoint:
        tensors: Tensors = {}
        for name, tensor in checkpoint.tensors.items():
            if tensor.ndim == 2 and LINEAR.search(name):
                tensors |= linear(name.removesuffix(".weight"), tensor)
            else:
                tensors[name] = tensor
        return Checkpoint(tensors, {**checkpoint.config, **config, "quantization_config": dict(method)})

    return change


def _split_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Undo transformers' fused experts: quantised checkpoints have a tensor per expert and projection."""
    tensors: Tensors = {}
    for name, tensor in checkpoint.tensors.items():
        prefix, _, kind = name.rpartition(".")
        if tensor.ndim != 3 or not prefix.endswith("mlp.experts"):
            tensors[name] = tensor
            continue
        names = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
        for number, expert in enumerate(tensor):
            parts = expert.chunk(len(names))
            tensors |= {f"{prefix}.{number}.{n}.weight": part for n, part in zip(names, parts, strict=True)}
    return Checkpoint(tensors, checkpoint.config)


def _fp8_blocks(name: str, weight: torch.Tensor) -> Tensors:
    blocks = [-(-size // BLOCK) for size in weight.shape]
    return {f"{name}.weight": _float8(weight.shape), f"{name}.weight_scale_inv": torch.rand(*blocks)}


def _fp8_static(name: str, weight: torch.Tensor) -> Tensors:
    scales = {f"{name}.{scale}": torch.rand(()) for scale in ("weight_scale", "input_scale")}
    return {f"{name}.weight": _float8(weight.shape), **scales}


def _channel_scale(weight: torch.Tensor) -> torch.Tensor:
    return torch.rand(weight.shape[0], 1).bfloat16()


def _fp8_channels(name: str, weight: torch.Tensor) -> Tensors:
    return {f"{name}.weight": _float8(weight.shape), f"{name}.weight_scale": _channel_scale(weight)}


def _int8_channels(name: str, weight: torch.Tensor) -> Tensors:
    integers = torch.randint(-127, 127, weight.shape, dtype=torch.int8)
    return {f"{name}.weight": integers, f"{name}.weight_scale": _channel_scale(weight)}


def _int4_packed(name: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        f"{name}.weight_packed": _packed(rows, columns // 8),
        f"{name}.weight_scale": torch.rand(rows, columns // BLOCK).bfloat16(),
        f"{name}.weight_shape": torch.tensor([rows, columns]),
    }


def _awq(group: int) -> Callable[[str, torch.Tensor], Tensors]:
    def linear(name: str, weight: torch.Tensor) -> Tensors:
        outputs, inputs = weight.shape
        return {
            f"{name}.qweight": _packed(inputs, outputs // 8),
            f"{name}.qzeros": _packed(inputs // group, outputs // 8),
            f"{name}.scales": torch.rand(inputs // group, outputs).half(),
        }

    return linear


def _gptq(group: int, *, shuffled: bool) -> Callable[[str, torch.Tensor], Tensors]:
    def linear(name: str, weight: torch.Tensor) -> Tensors:
        outputs, inputs = weight.shape
        order = torch.randperm(inputs) if shuffled else torch.arange(inputs)
        return {
            f"{name}.qweight": _packed(inputs // 8, outputs),
            f"{name}.qzeros": _packed(inputs // group, outputs // 8),
            f"{name}.scales": torch.rand(inputs // group, outputs).half(),
            f"{name}.g_idx": (order // group).int(),
        }

    return linear


def _in_half(checkpoint: Checkpoint) -> Checkpoint:
    """AWQ and GPTQ checkpoints are of float16."""
    tensors = {name: t.half() if t.dtype is torch.bfloat16 else t for name, t in checkpoint.tensors.items()}
    return Checkpoint(tensors, {**checkpoint.config, "dtype": "float16"})


def _mxfp4_experts(checkpoint: Checkpoint) -> Checkpoint:
    tensors: Tensors = {}
    for name, tensor in checkpoint.tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(100, 130, blocks, dtype=torch.uint8)
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    return Checkpoint(tensors, {**checkpoint.config, "quantization_config": method})


def _compressed(layout: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the configuration that llm-compressor writes."""
    common = {"symmetric": True, "dynamic": False, "group_size": None, "block_structure": None, "actorder": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.0,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "observer": "minmax", "observer_kwargs": {}, **weights},
                "input_activations": activations and {**common, **activations},
                "output_activations": None,
            }
        },
    }


FP8_BLOCKS = _quantise(
    {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    _fp8_blocks,
)
FP8_STATIC = _quantise({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_static)
CT_FP8 = _quantise(
    _compressed(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    ),
    _fp8_channels,
)
CT_INT8 = _quantise(
    _compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    ),
    _int8_channels,
)
CT_INT4 = _quantise(
    _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": BLOCK}, None),
    _int4_packed,
)
AWQ = _quantise(
    {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    },
    _awq(64),
)


def _gptq_change(*, shuffled: bool) -> Change:
    method = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "desc_act": shuffled,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    return _quantise(method, _gptq(64, shuffled=shuffled))


GPTQ = _gptq_change(shuffled=False)
HALF: Mapping[str, Any] = {"dtype": "float16"}

QUANTISED: tuple[Case, ...] = (
    Case(
        name="deepseek_v3_fp8block",
        make=hub("deepseek_v3", _split_experts, FP8_BLOCKS, **WIDE_DEEPSEEK, patch=NO_AUX),
    ),
    Case(name="llama_fp8block", make=hub("llama", FP8_BLOCKS, **WIDE)),
    Case(name="llama_fp8_static", make=hub("llama", FP8_STATIC, **WIDE)),
    Case(name="mixtral_fp8_static", make=hub("mixtral", FP8_STATIC, **MIXTRAL)),
    Case(name="llama_ct_fp8", make=hub("llama", CT_FP8, **WIDE)),
    Case(name="qwen3moe_ct_fp8", make=hub("qwen3_moe", CT_FP8, **QWEN3_MOE)),
    Case(name="llama_ct_int8", make=hub("llama", CT_INT8, **WIDE)),
    Case(name="llama_ct_w4a16", make=hub("llama", CT_INT4, **WIDE)),
    Case(name="qwen3moe_ct_w4a16", make=hub("qwen3_moe", CT_INT4, **QWEN3_MOE)),
    Case(name="llama_awq", make=hub("llama", AWQ, _in_half, **WIDE), engine=HALF),
    Case(name="mixtral_awq", make=hub("mixtral", AWQ, _in_half, **MIXTRAL), engine=HALF),
    Case(name="llama_gptq", make=hub("llama", GPTQ, _in_half, **WIDE), engine=HALF),
    Case(name="mixtral_gptq", make=hub("mixtral", GPTQ, _in_half, **MIXTRAL), engine=HALF),
    Case(
        name="llama_gptq_desc",
        make=hub("llama", _gptq_change(shuffled=True), _in_half, **WIDE),
        engine=HALF,
        unsupported="vLLM no longer takes GPTQ with desc_act=True",
    ),
    Case(
        name="gpt_oss_mxfp4",
        make=hub("gpt_oss", _mxfp4_experts, **WIDE, head_dim=64, num_local_experts=4, num_experts_per_tok=2),
    ),
    Case(name="llama_online_fp8", make=hub("llama", **WIDE), engine={"quantization": "fp8"}),
    Case(name="llama_online_fp8_tensor", make=hub("llama", **WIDE), engine={"quantization": "fp8_per_tensor"}),
    Case(
        name="qwen3_online_fp8_block", make=hub("qwen3", **WIDE, head_dim=64), engine={"quantization": "fp8_per_block"}
    ),
    Case(name="mixtral_online_fp8", make=hub("mixtral", **MIXTRAL), engine={"quantization": "fp8"}),
    Case(name="mamba2_online_fp8", make=hub("mamba2", **MAMBA2), engine={"quantization": "fp8"}),
)
