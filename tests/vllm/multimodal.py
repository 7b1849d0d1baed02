"""Models that see or hear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.vllm.case import SMALL, Case, Checkpoint, hub

__all__ = ["MULTIMODAL"]

VISION: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
SECTIONED_ROPE: Mapping[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
QWEN_TOKENS: Mapping[str, Any] = {
    "vision_start_token_id": 1,
    "vision_end_token_id": 2,
    "image_token_id": 3,
    "video_token_id": 4,
}
IMAGE_TOKENS: Mapping[str, Any] = {"boi_token_index": 1, "eoi_token_index": 2, "image_token_index": 3}


def _hub_names(checkpoint: Checkpoint) -> Checkpoint:
    """Give towers the prefixes they have on the hub, which current transformers no longer writes."""

    def rename(name: str) -> str:
        if name.startswith("vision_tower.") and "vision_model" not in name:
            return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        for inner in ("model.", "lm_head"):
            if name.startswith(f"language_model.model.{inner}"):
                return name.replace("language_model.model.", "language_model.", 1)
        return name

    return Checkpoint({rename(name): tensor for name, tensor in checkpoint.tensors.items()}, checkpoint.config)


def _hub_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Qwen3-VL's experts are stored input first; transformers writes them output first."""
    checkpoint.config["text_config"]["norm_topk_prob"] = True
    turned = {
        name: tensor.transpose(1, 2) if "experts" in name and tensor.ndim == 3 else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return Checkpoint(turned, checkpoint.config)


MULTIMODAL: tuple[Case, ...] = (
    Case(
        name="whisper",
        make=hub(
            "whisper",
            model="WhisperForConditionalGeneration",
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            vocab_size=256,
            max_source_positions=64,
            max_target_positions=64,
            num_mel_bins=80,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        engine={"max_model_len": 64},
    ),
    Case(
        name="qwen2_audio",
        make=hub(
            "qwen2_audio",
            _hub_names,
            model="Qwen2AudioForConditionalGeneration",
            text_config={"model_type": "qwen2", **SMALL},
            audio_config={
                "d_model": 64,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 128,
                "num_mel_bins": 80,
                "max_source_positions": 64,
            },
            audio_token_index=3,
        ),
    ),
    Case(
        name="clip",
        make=hub(
            "clip",
            model="CLIPModel",
            text_config={
                **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
                "max_position_embeddings": 77,
                "projection_dim": 64,
            },
            vision_config={**VISION, "projection_dim": 64},
            projection_dim=64,
        ),
        engine={"max_model_len": 77},
    ),
    Case(
        name="llava",
        make=hub(
            "llava",
            _hub_names,
            model="LlavaForConditionalGeneration",
            text_config={"model_type": "llama", **SMALL},
            # Features are taken from the last layer but one.
            vision_config={
                "model_type": "clip_vision_model",
                **VISION,
                "num_hidden_layers": 3,
                "projection_dim": 64,
            },
            image_token_index=255,
        ),
    ),
    Case(
        name="qwen2_vl",
        make=hub(
            "qwen2_vl",
            model="Qwen2VLForConditionalGeneration",
            text_config={**SMALL, "rope_parameters": dict(SECTIONED_ROPE)},
            vision_config={
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": 64,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 14,
            },
            **QWEN_TOKENS,
        ),
    ),
    Case(
        name="qwen2_5_vl",
        make=hub(
            "qwen2_5_vl",
            model="Qwen2_5_VLForConditionalGeneration",
            text_config={**SMALL, "rope_parameters": dict(SECTIONED_ROPE)},
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "out_hidden_size": 64,
                "num_heads": 4,
                "intermediate_size": 128,
                "patch_size": 14,
                "fullatt_block_indexes": [1],
            },
            **QWEN_TOKENS,
        ),
    ),
    Case(
        name="qwen3_vl_moe",
        make=hub(
            "qwen3_vl_moe",
            _hub_experts,
            model="Qwen3VLMoeForConditionalGeneration",
            text_config={
                **SMALL,
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "moe_intermediate_size": 64,
                "rope_parameters": {**SECTIONED_ROPE, "mrope_interleaved": True},
            },
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "out_hidden_size": 64,
                "num_heads": 4,
                "intermediate_size": 128,
                "patch_size": 16,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 64,
            },
            **QWEN_TOKENS,
        ),
    ),
    Case(
        name="llama4",
        make=hub(
            "llama4",
            model="Llama4ForConditionalGeneration",
            text_config={
                **SMALL,
                "intermediate_size": 64,
                "intermediate_size_mlp": 128,
                "head_dim": 16,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
                "attention_chunk_size": 64,
            },
            vision_config={
                **VISION,
                "intermediate_size": 256,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "vision_output_dim": 64,
            },
            **IMAGE_TOKENS,
        ),
    ),
    Case(
        name="gemma3_mm",
        make=hub(
            "gemma3",
            _hub_names,
            model="Gemma3ForConditionalGeneration",
            text_config={**SMALL, "head_dim": 16, "sliding_window": 64},
            vision_config=dict(VISION),
            mm_tokens_per_image=4,
            **IMAGE_TOKENS,
        ),
    ),
    Case(
        name="mistral3",
        make=hub(
            "mistral3",
            model="Mistral3ForConditionalGeneration",
            text_config={"model_type": "mistral", **SMALL, "head_dim": 16},
            vision_config={"model_type": "pixtral", **VISION},
            image_token_index=3,
        ),
    ),
    Case(
        name="idefics3",
        make=hub(
            "idefics3",
            model="Idefics3ForConditionalGeneration",
            text_config={"model_type": "llama", **SMALL, "pad_token_id": 0},
            vision_config=dict(VISION),
            image_token_id=3,
            scale_factor=2,
            pad_token_id=0,
        ),
    ),
)
