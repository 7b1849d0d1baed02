"""Encoders, and decoders that vLLM turns into embedding models and rerankers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.vllm.case import SMALL, Case, hub

__all__ = ["ENCODERS"]

BERT: Mapping[str, Any] = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
# RoBERTa counts positions from two on.
ROBERTA: Mapping[str, Any] = {**BERT, "max_position_embeddings": 258, "type_vocab_size": 1}
QWEN3: Mapping[str, Any] = {**SMALL, "head_dim": 16}
RERANKER: Mapping[str, Any] = {
    "runner": "pooling",
    "hf_overrides": {
        "architectures": ["Qwen3ForSequenceClassification"],
        "is_original_qwen3_reranker": True,
        "classifier_from_token": ["no", "yes"],
    },
}
# vLLM makes the reranker's score from the head's rows for two words, which it looks up.
TOKENIZER: Mapping[str, Any] = {
    "tokenizer.json": {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "no": 5, "yes": 9}, "unk_token": "[UNK]"},
    },
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"},
}

ENCODERS: tuple[Case, ...] = (
    Case(name="bert", make=hub("bert", **BERT, model="BertModel")),
    Case(name="bert_cls", make=hub("bert", **BERT, model="BertForSequenceClassification")),
    Case(name="roberta", make=hub("roberta", **ROBERTA, model="RobertaModel")),
    Case(name="xlm_roberta_cls", make=hub("xlm-roberta", **ROBERTA, model="XLMRobertaForSequenceClassification")),
    Case(
        name="modernbert",
        make=hub(
            "modernbert",
            **BERT,
            model="ModernBertModel",
            pad_token_id=0,
            cls_token_id=1,
            sep_token_id=2,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    Case(name="qwen3_embed", make=hub("qwen3", **QWEN3), engine={"runner": "pooling", "convert": "embed"}),
    Case(
        name="qwen3_reranker",
        make=hub("qwen3", **QWEN3, tie_word_embeddings=False),
        engine=RERANKER,
        files=TOKENIZER,
    ),
    # The score is computed when loading ends. Whether what it needs came first or last must not matter, nor whether
    # the first tensor, which vLLM looks at to guess a prefix, is small.
    Case(
        name="qwen3_reranker_lmlast",
        make=hub("qwen3", **QWEN3, tie_word_embeddings=False),
        engine=RERANKER,
        files=TOKENIZER,
        order=lambda name: (name.startswith("lm_head"), not name.startswith("model.norm"), name),
    ),
    Case(
        name="qwen3_reranker_tied",
        make=hub("qwen3", **QWEN3, tie_word_embeddings=True),
        engine=RERANKER,
        files=TOKENIZER,
        order=lambda name: (not name.startswith("model.norm"), name),
    ),
)
