"""Weights that vLLM's code reads by name from the model's folder, and does without when they are missing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from streamer.artifacts.metadata import pull
from streamer.config import StreamConfig
from tests.servers.object_server import ObjectServer

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"},
]
DENSE = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    for number, (name, inside, out) in enumerate((("2_Dense", 4, 8), ("3_Dense", 8, 4))):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps({**DENSE, "in_features": inside, "out_features": out}))
        weights = {"linear.weight": torch.randn(out, inside)}
        if number:
            torch.save(weights, root / name / "pytorch_model.bin")
        else:
            safetensors.torch.save_file(weights, root / name / "model.safetensors")
    (root / "modules.json").write_text(json.dumps(MODULES))
    (root / "config.json").write_text("{}")
    safetensors.torch.save_file({"a": torch.zeros(2)}, root / "model.safetensors")
    return root


def test_dense_layers_of_sentence_transformers(folder: Path, tmp_path: Path, server: ObjectServer) -> None:
    from vllm.model_executor.models.adapters import _load_st_projector

    def projector(model: Path) -> Any:
        made: Any = SimpleNamespace(model=str(model), revision=None, head_dtype=torch.float32)
        return _load_st_projector(made)

    server.put_folder("models", "st/", folder)
    config = StreamConfig.resolve({"endpoint_url": server.url, "cache_dir": str(tmp_path / "cache")})
    pulled = pull("s3://models/st", config).folder
    assert not (pulled / "model.safetensors").exists()
    given = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(projector(pulled)(given), projector(folder)(given))
        assert len(list(projector(pulled).parameters())) == 2
