"""What the tests of the doctor share."""

from __future__ import annotations

import asyncio
import json

from streamer.config import StreamConfig
from streamer.doctor import Check, Diagnosis, diagnose
from tests.files import entry, raw_file
from tests.servers.object_server import ObjectServer

BODY = bytes(range(256)) * 1024
WEIGHTS = raw_file({"a": entry("U8", [len(BODY)], 0, len(BODY))}, BODY)
FILES = {"model.safetensors": WEIGHTS, "config.json": json.dumps({"model_type": "llama"}).encode()}
QUICK = {"connect_timeout_seconds": 3.0, "retry_first_wait_seconds": 0.01, "idle_timeout_seconds": 3.0}


def put_model(server: ObjectServer, prefix: str = "m/") -> None:
    for name, body in FILES.items():
        server.put("bucket", prefix + name, body)


def look(url: str = "s3://bucket/m", /, **options: object) -> Diagnosis:
    return asyncio.run(diagnose(url, StreamConfig.resolve({**QUICK, **options})))


def check_of(found: Diagnosis, name: str) -> Check:
    return next(check for check in found.checks if check.name == name)


def failed(found: Diagnosis) -> list[str]:
    return [check.name for check in found.checks if check.ok is False]


def everything(found: Diagnosis) -> str:
    return "\n".join(f"{check!r} {check.error}" for check in found.checks)
