"""Each script of examples/python, run as its first lines say, against a server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertModel, LlamaConfig, LlamaForCausalLM

from tests.servers.object_server import ObjectServer
from tests.test_minilm import checkpoint_folder

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "examples" / "python"
WORDS = "embeddings.word_embeddings.weight"


@pytest.fixture
def minilm(server: ObjectServer) -> ObjectServer:
    """The real checkpoint, as s3://bucket/org/all-minilm."""
    put(server, checkpoint_folder(), "org/all-minilm")
    return server


def put(server: ObjectServer, folder: Path, prefix: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            server.put_file("bucket", f"{prefix}/{path.relative_to(folder).as_posix()}", path)


def run(script: str, server: ObjectServer, url: str, *arguments: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", SCRIPTS / script, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "S3STREAM_ENDPOINT_URL": server.url, "MODEL_URL": url, **environ},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_script_is_run_here_and_described() -> None:
    readme = (SCRIPTS / "README.md").read_text()
    for script in SCRIPTS.glob("*.py"):
        assert f'run("{script.name}"' in Path(__file__).read_text()
        assert f"[`{script.name}`]({script.name})" in readme


def test_library(minilm: ObjectServer) -> None:
    output = run("library.py", minilm, "s3://bucket/org/all-minilm", TENSOR=WORDS, RANK="1", WORLD_SIZE="2")
    assert f"{WORDS} has shape [30522, 384] and dtype torch.float32" in output
    assert f"rank 1 of 2 holds 15261 rows and fetched {15261 * 384 * 4} bytes for them" in output
    output = run("library.py", minilm, "s3://bucket/org/all-minilm")
    assert "rank 0 of 1 holds" in output


def test_library_of_a_tensor_that_is_not_there(minilm: ObjectServer) -> None:
    with pytest.raises(AssertionError, match="has no tensor nothing"):
        run("library.py", minilm, "s3://bucket/org/all-minilm", TENSOR="nothing")


def test_fsspec_files(minilm: ObjectServer) -> None:
    output = run("fsspec_files.py", minilm, "s3stream://bucket/org/all-minilm/")
    tensors = len(load_file(checkpoint_folder() / "model.safetensors"))
    assert output == f"model_type: bert\nbucket/org/all-minilm/model.safetensors: {tensors} tensors\n"


def test_transformers_encoder(minilm: ObjectServer) -> None:
    output = run("transformers_model.py", minilm, "s3://bucket/org/all-minilm", "a sentence")
    local: Any = BertModel.from_pretrained(checkpoint_folder()).eval()  # type: ignore[no-untyped-call]
    inputs = AutoTokenizer.from_pretrained(checkpoint_folder())("a sentence", return_tensors="pt")
    with torch.no_grad():
        vector = local(**inputs).last_hidden_state.mean(1)[0]
    assert [float(number) for number in output.split()] == pytest.approx(vector[:8].tolist(), abs=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_causal_model(server: ObjectServer, tmp_path: Path, tied: bool) -> None:
    """With rotary frequencies, which to_empty leaves without values, and with parameters that are one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30522,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    local: Any = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    local.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (found := checkpoint_folder() / name).exists():
            shutil.copy(found, tmp_path)
    put(server, tmp_path, "tiny")
    output = run("transformers_model.py", server, "s3://bucket/tiny", "several words that positions tell apart")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer("several words that positions tell apart", return_tensors="pt")
    written = local.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=8, do_sample=False
    )
    assert output.strip() == tokenizer.decode(written[0])
