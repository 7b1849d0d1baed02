"""``s3stream verify`` reads every byte in order, so it holds files against whatever checksum the store keeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from streamer.checkpoint.manifest import MANIFEST_KEY
from streamer.cli.app import app
from tests.servers.checksums import keep
from tests.servers.object_server import Fault, ObjectServer, error_response

KEY = "model.safetensors"
STATE = {"a": torch.randn(200, 300), "b": torch.randn(1000), "c": torch.randn(3)}
BODY = safetensors.torch.save(STATE)
PARTS = [100_000, 100_000, len(BODY) - 200_000]
ALGORITHMS = ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256", "SHA512"]


@pytest.fixture
def store(server: ObjectServer) -> ObjectServer:
    server.put("models", f"m/{KEY}", BODY)
    return server


def upload(store: ObjectServer, algorithm: str, parts: list[int]) -> None:
    store.checksums["models", f"m/{KEY}"] = keep(algorithm, BODY, parts)


def verify(store: ObjectServer, *arguments: str, json_output: bool = True) -> tuple[int, Any]:
    given = ["verify", "s3://models/m", "--endpoint-url", store.url, "--quiet", *arguments]
    # Sixteen connections, of which any may be the last to deliver.
    given += ["--option", "request_bytes=64KiB", "--option", "concurrency=16"]
    done = CliRunner().invoke(app, [*given, "--json"] if json_output else given)
    if done.exit_code or not json_output:
        return done.exit_code, done.stdout + done.stderr
    return 0, json.loads(done.stdout)


@pytest.mark.parametrize("parts", [[], PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_file_is_held_against_its_stored_checksum(
    algorithm: str, parts: list[int], store: ObjectServer, tmp_path: Path
) -> None:
    upload(store, algorithm, parts)

    def delay(request: Any, response: Any) -> None:
        response.delay_seconds = 0.15

    store.faults.append(Fault(delay, key=KEY, skip=1))  # the first piece comes last
    target = str(tmp_path / "manifest.json")
    code, document = verify(store, "--output", target)
    known = {"algorithm": algorithm, "parts": len(parts) or 1, "checked": True, "why": None}
    assert (code, document["checksums"]) == (0, {KEY: known})
    _, text = verify(store, "--output", target, json_output=False)
    assert f"1 of 1 files are as the store's checksums say ({algorithm})" in text
    body = bytearray(BODY)
    body[150_000] ^= 1
    store.objects["models"][f"m/{KEY}"].content = bytes(body)
    code, text = verify(store, "--write")
    assert code == 6
    what = "bytes 100000-199999: part 2" if parts else f"bytes 0-{len(BODY) - 1}: the file"
    assert f"s3://models/m/{KEY} {what} has the {algorithm}" in text
    assert f"m/{MANIFEST_KEY}" not in store.objects["models"]
    assert store.counters.requests["PUT"] == 0


def test_a_manifest_is_compared_too(store: ObjectServer, tmp_path: Path) -> None:
    """Damage that the manifest would show as well is the store's fault, which is said first."""
    upload(store, "SHA256", [])
    target = tmp_path / "manifest.json"
    assert verify(store, "--output", str(target))[0] == 0
    store.put("models", f"m/{MANIFEST_KEY}", target.read_bytes())
    code, document = verify(store)
    assert (code, document["problems"], document["checksums"][KEY]["checked"]) == (0, [], True)
    upload(store, "SHA256", [])
    store.checksums["models", f"m/{KEY}"] = keep("SHA256", b"other")
    assert verify(store)[0] == 6


def test_what_cannot_be_checked_is_said(store: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = str(tmp_path / "manifest.json")

    def outcome() -> Any:
        code, document = verify(store, "--output", target)
        assert code == 0
        found = document["checksums"][KEY]
        assert (found["checked"], found["parts"]) == (False, 0)
        return found["algorithm"], found["why"]

    assert outcome() == (None, "the store keeps no checksum of it")
    upload(store, "XXHASH64", [])
    algorithm, why = outcome()
    assert algorithm == "XXHASH64"
    assert "does not compute XXHASH64" in why
    upload(store, "CRC64NVME", [])
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    assert "CRC64NVME needs the package awscrt" in outcome()[1]
    _, text = verify(store, "--output", target, json_output=False)
    assert f"{KEY} was not held against its stored checksum: " in text
    upload(store, "SHA256", PARTS)
    answer = error_response(403, "AccessDenied")
    store.faults.append(Fault(lambda request, response: answer, times=None, method="ATTRIBUTES"))
    assert "s3:GetObjectAttributes" in outcome()[1]


def test_a_store_that_refuses_the_question_can_still_be_verified(store: ObjectServer, tmp_path: Path) -> None:
    def refuse(request: Any, response: Any) -> Any:
        return error_response(400, "InvalidArgument") if "x-amz-checksum-mode" in request.headers else None

    store.faults.append(Fault(refuse, times=None, method="HEAD"))
    code, document = verify(store, "--output", str(tmp_path / "manifest.json"))
    assert (code, document["checksums"][KEY]["why"]) == (0, "the store refuses requests with x-amz-checksum-mode")


def test_local_files_keep_no_checksums(tmp_path: Path) -> None:
    (tmp_path / KEY).write_bytes(BODY)
    done = CliRunner().invoke(app, ["verify", str(tmp_path), "--write", "--json", "--quiet"])
    found = json.loads(done.stdout)["checksums"][KEY]
    assert found == {"algorithm": None, "parts": 0, "checked": False, "why": "such a source keeps no checksums"}
