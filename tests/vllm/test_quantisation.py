"""Quantisation while loading, and checkpoints whose tensors are parts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from streamer.config import StreamConfig
from streamer.fetch.engine import FetchEngine
from streamer.fetch.fill import CopyJob
from streamer.session import LoadSession
from streamer.sources import open_source
from tests.vllm.cases import Case
from tests.vllm.host import build, loading
from tests.vllm.test_census import load_ours

Get = Callable[[str], tuple[Case, Path]]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        # Per decoder layer: qkv, o, gate_up, down; in the order in which the checkpoint has them.
        ("llama_online_fp8", [1, 2, 1, 3]),
        # Twelve matrices of four experts at once.
        ("mixtral_online_fp8", [12, 1, 3]),
    ],
)
def test_a_layer_is_fetched_in_one_go_when_it_is_quantised(
    checkpoint: Get, monkeypatch: pytest.MonkeyPatch, name: str, layers: list[int]
) -> None:
    fill = FetchEngine.fill
    fills: list[int] = []

    def counted(self: FetchEngine, jobs: Sequence[CopyJob], *rest: Any) -> Any:
        fills.append(len(jobs))
        return fill(self, jobs, *rest)

    monkeypatch.setattr(FetchEngine, "fill", counted)
    case, folder = checkpoint(name)
    report = load_ours(build(folder, case, tensor=2, rank=1))
    assert fills[:-1] == layers * 2
    assert not report.materialised
    assert set(report.expected) - set(report.loaded) == {
        name for name in report.expected if name.endswith("_scale")
    }  # made by quantisation
    assert not report.ignored


def test_vllm_finishes_what_waits_while_its_bytes_can_be_fetched(
    checkpoint: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers wait for the end of loading, with lazy tensors in their hands; nothing of ours is left then."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from streamer.trace.lazy import LazyTensor

    case, folder = checkpoint("llama_online_fp8")
    built = build(folder, case, tensor=2, rank=1)
    from vllm.config.load import LoadConfig

    from vllm_s3stream.loader import S3StreamLoader

    with loading(built):
        S3StreamLoader(LoadConfig(load_format="s3stream", use_tqdm_on_load=False)).load_weights(
            built.model, built.model_config
        )
    held = [
        value
        for module in built.model.modules()
        for _, bound in get_layerwise_info(module).loaded_weights
        for value in (*bound.args, *bound.kwargs.values())
    ]
    assert not any(isinstance(value, LazyTensor) for value in held)


def test_quantisation_methods_are_given_back(checkpoint: Get) -> None:
    case, folder = checkpoint("llama_online_fp8")
    built = build(folder, case, tensor=1, rank=0)
    load_ours(built)
    methods = {getattr(module, "quant_method", None) for module in built.model.modules()} - {None}
    assert methods
    assert not any("process_weights_after_loading" in vars(method) for method in methods)


def test_torchao_tensors_are_put_together_across_files(tmp_path: Path) -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    from vllm_s3stream.torchao import unflattened

    weights = {}
    for name in ("a.weight", "b.weight"):
        layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        quantize_(layer, Float8WeightOnlyConfig())
        weights[name] = layer.weight
    flat, metadata = flatten_tensor_state_dict({**weights, "norm.weight": torch.randn(8)})
    names = sorted(flat)
    for number, part in enumerate((names[:1], names[1:]), 1):  # the first tensor is cut in two
        file = tmp_path / f"model-{number:05}-of-00002.safetensors"
        safetensors.torch.save_file({name: flat[name].contiguous() for name in part}, file, metadata=metadata)
    config = StreamConfig()
    with LoadSession(None, config) as session:
        found = dict(unflattened(session, session.open(open_source(str(tmp_path), config))))
    assert set(found) == {*weights, "norm.weight"}
    for name, weight in weights.items():
        assert type(found[name]) is type(weight.data)
        assert torch.equal(found[name].dequantize(), weight.dequantize())
