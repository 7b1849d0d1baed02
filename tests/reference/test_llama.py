"""The reference engine against Transformers' own models, at TP 1, 2 and 4, from an S3 endpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import streamer
from streamer.engines import ParallelLayout, find_engine
from streamer.errors import ConfigError, LoadError, UnsupportedCheckpointError
from streamer.reference.config import LlamaConfig
from streamer.reference.engine import build_llama
from streamer.reference.llama import LlamaForCausalLM
from streamer.reference.parallel import Parallel
from streamer.sources.memory import MemorySource
from tests.reference.ranks import run_on_ranks
from tests.servers.object_server import ObjectServer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,  # not divisible: the last rank's rows are padded
    "max_position_embeddings": 256,
}
TOKENS = torch.randint(0, 101, (2, 70), generator=torch.Generator().manual_seed(1))


def make_model(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    return model


def save(model: Any, folder: Path, shard: str = "100KB") -> dict[str, Any]:
    model.save_pretrained(folder, max_shard_size=shard)
    document: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return document


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": (
        "Llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 500000.0,
            }
        },
    ),
    "linear rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "one kv head": ("Llama", {"num_key_value_heads": 1}),
    "head size": ("Llama", {"head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": 128}),
    "qwen2": ("Qwen2", {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_one_rank_matches_transformers(name: str, tmp_path: Path) -> None:
    kind, options = VARIANTS[name]
    model = make_model(kind, **options)
    document = save(model, tmp_path)
    ours = build_llama(LlamaConfig.from_dict(document), Parallel(), load_device="cpu")
    report = streamer.load(ours, str(tmp_path))
    with torch.no_grad():
        assert (ours(TOKENS) - model(TOKENS).logits).abs().max() < 1e-4
    assert report.materialised == ()
    assert set(report.loaded) == {parameter for parameter, _ in ours.named_parameters(remove_duplicate=False)}


def load_rank(parallel: Parallel, document: Mapping[str, Any], url: str, endpoint: str) -> dict[str, dict[str, Any]]:
    """Return what there is after a load in each mode."""
    found = {}
    for mode in ("trace", "eager"):
        model = build_llama(LlamaConfig.from_dict(document), parallel, load_device="cpu")
        report = streamer.load(model, url, {"endpoint_url": endpoint, "mode": mode})
        found[mode] = {
            "state": {name: value.clone() for name, value in model.state_dict().items()},
            "needed": report.needed_bytes,
            "own": sum(parameter.nbytes for parameter in model.parameters()),
            "logits": model(TOKENS),
        }
    return found


@pytest.mark.parametrize(("size", "name"), [(2, "llama"), (4, "llama"), (2, "one kv head"), (4, "tied")])
def test_ranks_match_transformers_from_s3(server: ObjectServer, tmp_path: Path, size: int, name: str) -> None:
    kind, options = VARIANTS[name]
    model = make_model(kind, **options)
    document = save(model, tmp_path)
    server.put_folder("bucket", "m/", tmp_path)
    with torch.no_grad():
        expected = model(TOKENS).logits
    ranks = run_on_ranks(size, load_rank, document, "s3://bucket/m", server.url)
    padding = (-SIZES["vocab_size"] % size) * 64 * 4 * (1 if options.get("tie_word_embeddings") else 2)
    for rank, found in enumerate(ranks):
        traced, eager = found["trace"], found["eager"]
        assert (traced["logits"] - expected).abs().max() < 1e-4
        assert traced["needed"] == traced["own"] - (padding if rank == size - 1 else 0)
        for parameter, value in traced["state"].items():
            assert torch.equal(value, eager["state"][parameter]), f"{parameter} at rank {rank}"


def test_shards_of_all_ranks_make_up_the_whole(tmp_path: Path) -> None:
    """Without a group: every rank's parameters are the slices that Megatron's scheme says."""
    model = make_model("Llama", vocab_size=104)
    document = save(model, tmp_path)
    state = model.state_dict()
    for size in (2, 4, 8):
        for rank in range(size):
            ours = build_llama(LlamaConfig.from_dict(document), Parallel(rank, size), load_device="cpu")
            streamer.load(ours, str(tmp_path))
            got = dict(ours.named_parameters())
            prefix = "model.layers.1."
            rows = 64 // size
            assert torch.equal(
                got[prefix + "self_attn.qkv_proj.weight"][:rows],
                state[prefix + "self_attn.q_proj.weight"][rank * rows : (rank + 1) * rows],
            )
            kv = max(1, 4 // size) * 8
            start = rank * 4 // size * 8
            assert torch.equal(
                got[prefix + "self_attn.qkv_proj.weight"][rows : rows + kv],
                state[prefix + "self_attn.k_proj.weight"][start : start + kv],
            )
            columns = 96 // size
            assert torch.equal(
                got[prefix + "mlp.down_proj.weight"],
                state[prefix + "mlp.down_proj.weight"][:, rank * columns : (rank + 1) * columns],
            )
            assert torch.equal(
                got[prefix + "mlp.gate_up_proj.weight"][columns:],
                state[prefix + "mlp.up_proj.weight"][rank * columns : (rank + 1) * columns],
            )


def document_of(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **SIZES, **changes}


@pytest.mark.parametrize(
    ("document", "size", "words"),
    [
        (document_of(), 3, r"attention heads \(8\) cannot|key-value heads cannot|cannot be split over 3"),
        (document_of(intermediate_size=100), 8, "rows of gate_proj .100. cannot be split over 8 ranks"),
        (document_of(num_key_value_heads=3, num_attention_heads=12), 4, "3 key-value heads cannot be spread over 4"),
        (document_of(hidden_size=None), 1, "hidden_size as None"),
        (document_of(torch_dtype="int99"), 1, "gives the dtype as 'int99'"),
    ],
)
def test_impossible_sizes_are_named(document: dict[str, Any], size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_llama(LlamaConfig.from_dict(document), Parallel(0, size))


def test_other_architectures_point_to_other_engines() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="does not know model_type 'mamba'.*--engine vllm"):
        LlamaConfig.from_dict(document_of(model_type="mamba"))
    with pytest.raises(UnsupportedCheckpointError, match="gelu"):
        LlamaConfig.from_dict(document_of(hidden_act="gelu"))
    model = build_llama(LlamaConfig.from_dict(document_of(rope_scaling={"rope_type": "yarn"})), Parallel())
    with pytest.raises(UnsupportedCheckpointError, match="RoPE scaling 'yarn'"):
        model(TOKENS)


def test_shapes_that_do_not_fit_are_named() -> None:
    import safetensors.torch

    model = build_llama(LlamaConfig.from_dict(document_of()), Parallel(), load_device="cpu")
    body = safetensors.torch.save({"model.norm.weight": torch.ones(63)})
    with pytest.raises(LoadError, match=r"RMSNorm.weight has shape \[64\], the checkpoint offers \[63\]"):
        streamer.load(model, MemorySource({"model.safetensors": body}))


def test_engine_is_found_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document_of()))
    built = find_engine("reference").build(tmp_path, ParallelLayout(tensor=2), 1)
    assert all(parameter.is_meta for parameter in built.model.parameters())
    with pytest.raises(ConfigError, match="no engine 'none'.*installed: .*reference"):
        find_engine("none")
    with pytest.raises(ConfigError, match="tensor-parallel only"):
        find_engine("reference").build(tmp_path, ParallelLayout(tensor=1, pipeline=2), 0)


def test_other_threads_see_nothing_of_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has one default dtype for all of them; two builds at once have left it changed."""
    seen: list[torch.dtype] = []

    class Watched(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig, parallel: Parallel) -> None:
            super().__init__(config, parallel)
            seen.append(torch.get_default_dtype())

    monkeypatch.setattr("streamer.reference.engine.LlamaForCausalLM", Watched)
    document = {**SIZES, "model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True}
    model = build_llama(LlamaConfig.from_dict(document), Parallel())
    assert seen == [torch.float32]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
