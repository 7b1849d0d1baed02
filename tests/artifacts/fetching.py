"""What the tests of fetching share: a checkpoint in a store, and the command in processes that are ended."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import safetensors.torch
import torch

from streamer.artifacts.destination import WORK_FOLDER
from streamer.artifacts.metadata import PINS_FILE
from streamer.config import StreamConfig
from tests.servers.object_server import ObjectServer

ROOT = Path(__file__).parent.parent.parent
URL = "s3://models/org/m"

SHARDS = 3
TENSORS = {
    f"layer.{number}": torch.frombuffer(bytearray(random.Random(number).randbytes(1_600_000)), dtype=torch.int32)
    for number in range(SHARDS)
}
WEIGHTS = {
    f"model-{number + 1:05}-of-{SHARDS:05}.safetensors": safetensors.torch.save({f"layer.{number}": tensor})
    for number, tensor in enumerate(TENSORS.values())
}
METADATA = {
    "config.json": b"{}",
    "tokenizer.json": b"words " * 50_000,
    "2_Dense/model.safetensors": b"dense layers, which engines read by name",
    "1_Pooling/config.json": b'{"pooling": true}',
    "modeling_custom.py": b"x = 1",
    "merges.txt": b"",
}
OTHERS = {
    "pytorch_model.bin": b"pickle",
    "original/params.json": b"{}",
    ".git/HEAD": b"ref",
    "consolidated.safetensors": b"w" * 10,
}
ALL = {**METADATA, **WEIGHTS}


def put_all(server: ObjectServer, **more: bytes) -> None:
    for key, body in {**ALL, **OTHERS, **more}.items():
        server.put("models", f"org/m/{key}", body)


def config_for(server: ObjectServer, **options: object) -> StreamConfig:
    small = {"request_bytes": "64KiB", "hedge": False, "retry_first_wait_seconds": 0.01}
    return StreamConfig.resolve({"endpoint_url": server.url, **small, **options})


def tree(folder: Path) -> dict[str, bytes]:
    """Return all files but those that say how they came there."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {key: body for key, body in found.items() if key != PINS_FILE and not key.startswith(f"{WORK_FOLDER}/")}


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / WORK_FOLDER).iterdir() if path.name != "lock")


def start(
    server: ObjectServer, folder: Path, *arguments: str, before: tuple[str, ...] = (), url: str = URL
) -> subprocess.Popen[str]:
    """Start ``s3stream fetch`` in a process of its own."""
    options = {"endpoint_url": server.url, "request_bytes": "64KiB", "hedge": "no", "concurrency": "8"}
    settings = {f"S3STREAM_{name.upper()}": value for name, value in options.items()}
    return subprocess.Popen(
        [*before, sys.executable, "-c", "from streamer.cli import main; main()", "fetch", url, str(folder), *arguments],
        cwd=ROOT,
        env={**settings, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
