"""The real engine on CPU updates its weights: tokens are those of the new checkpoint, or still those of the old one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ACCESS_KEY, SECRET_KEY
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.vllm import serving
from tests.vllm.serving import EngineHost, Server
from tests.vllm.updating import EXTENSION

pytestmark = pytest.mark.skipif(not serving.has_cpu_engine(), reason="there is no vLLM for CPU")

ROOT = Path(__file__).parents[2]
BUCKET = "updating"
#: Longer than a block of the prefix cache.
LONG = " ".join(f"w{number}" for number in range(10, 50))
PROMPTS = [LONG, *serving.PROMPTS]
ENGINE: dict[str, Any] = {"load_format": "s3stream", "max_model_len": 128, "block_size": 32}


@dataclass(frozen=True)
class Models:
    """Checkpoints of one model, one of another, and an adapter; the store has them under the same names."""

    root: Path
    server: ObjectServer

    def folder(self, name: str) -> Path:
        return self.root / name

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    root = tmp_path_factory.mktemp("updating")
    for number, name in enumerate(("one", "two", "three")):
        serving.make_tokenizer(serving.make_llama(root / name, seed=number))
    serving.make_tokenizer(serving.make_llama(root / "other", seed=3, layers=1))
    serving.make_adapter(root / "adapter", root / "one")
    with ObjectServer(require_signature=True) as server:
        for folder in root.iterdir():
            server.put_folder(BUCKET, f"{folder.name}/", folder)
        yield Models(root, server)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def environment(scratch: Path, models: Models, **more: str) -> dict[str, str]:
    variables = serving.engine_environment(
        scratch, access_key=ACCESS_KEY, secret_key=SECRET_KEY, endpoint_url=models.server.url
    )
    # The workers import an extension from here.
    return {**variables, "PYTHONPATH": os.pathsep.join([variables["PYTHONPATH"], str(ROOT)]), **more}


@pytest.fixture(scope="module")
def host(scratch: Path, models: Models) -> Iterator[EngineHost]:
    """Makes engines of one rank, in its own process."""
    variables = environment(scratch, models, S3STREAM_RETRY_DEADLINE_SECONDS="2")
    with EngineHost(variables, scratch / "host.log", in_process=True) as started:
        yield started


@pytest.fixture(scope="module")
def expected(host: EngineHost, models: Models) -> dict[str, list[list[int]]]:
    """Tokens of engines that vLLM's own loader started with each checkpoint, with the adapter too."""
    found = {}
    engine = {**ENGINE, "load_format": "auto"}
    adapter = str(models.folder("adapter"))
    for name in ("one", "two"):
        steps: list[dict[str, Any]] = [{"generate": PROMPTS}]
        options: dict[str, Any] = {}
        if name == "two":
            steps.append({"generate": PROMPTS, "adapter": adapter})
            options = {"enable_lora": True, "max_lora_rank": 8}
        plain, *adapted = host.follow(models.folder(name), steps, **engine, **options)
        found[name] = plain
        if adapted:
            found[f"{name}+adapter"] = adapted[0]
    assert len({json.dumps(tokens) for tokens in found.values()}) == 3
    return found


def test_an_engine_in_this_process(host: EngineHost, models: Models, expected: dict[str, list[list[int]]]) -> None:
    models.server.faults = [
        Fault(lambda *_: error_response(500, "InternalError", "disk on fire"), key="three/model-00002", times=None)
    ]
    adapter = str(models.folder("adapter"))
    ask: dict[str, Any] = {"generate": PROMPTS}
    steps: list[dict[str, Any]] = [
        ask,
        {"generate": PROMPTS, "adapter": adapter},
        {"update": models.url("two"), "version": "2"},
        ask,
        {"generate": PROMPTS, "adapter": adapter},
        {"update": models.url("other")},
        {"update": models.url("three")},
        ask,
        {"update": models.url("one")},
        ask,
    ]
    found = host.follow(
        models.url("one"), steps, worker_extension_cls=EXTENSION, enable_lora=True, max_lora_rank=8, **ENGINE
    )
    before, _, updated, after, adapted, other, broken, still, back, again = found
    assert before == expected["one"]
    assert updated["url"] == models.url("two") + "/"
    assert updated["version"] == "2"
    assert updated["ranks"] == 1
    assert updated["nbytes"] > 0
    assert after == expected["two"]
    assert adapted == expected["two+adapter"]
    assert other["type"] == "CheckpointError"
    assert "does not fit the model that is served" in other["error"]
    assert broken["type"] == "SourceUnavailableError"
    assert "disk on fire" in broken["error"]
    assert still == expected["two"]
    assert back["version"] == models.url("one")
    assert again == expected["one"]


def test_an_asynchronous_engine(
    scratch: Path, models: Models, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    models.server.faults = []
    ask: dict[str, Any] = {"generate": PROMPTS}
    steps: list[dict[str, Any]] = [ask, {"update": models.url("two")}, ask, {"update": models.url("other")}, ask]
    with EngineHost(environment(scratch, models), tmp_path / "log", in_process=False) as host:
        found = host.follow(models.url("one"), steps, asynchronous=True, worker_extension_cls=EXTENSION, **ENGINE)
        assert host.close() == 0, host.tree.output()
    assert [found[0], found[2], found[4]] == [expected["one"], expected["two"], expected["two"]]
    assert found[1]["version"] == models.url("two")
    assert found[3]["type"] == "CheckpointError"


def test_two_ranks_share_an_update(
    scratch: Path, models: Models, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    models.server.faults = []
    variables = environment(
        scratch, models, S3STREAM_SHARE="require", S3STREAM_REPORT_DIR=str(tmp_path / "reports"), **serving.two_ranks()
    )
    steps: list[dict[str, Any]] = [{"update": models.url("two")}, {"generate": PROMPTS}]
    with EngineHost(variables, tmp_path / "log", in_process=False) as host:
        updated, tokens = host.follow(
            models.url("one"), steps, tensor_parallel_size=2, worker_extension_cls=EXTENSION, **ENGINE
        )
        assert host.close() == 0, host.tree.output()
    assert updated["ranks"] == 2
    assert tokens == expected["two"]
    reports = [report for report in serving.read_reports(tmp_path / "reports") if report["url"] == updated["url"]]
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert report["sharing"]["ranks"] == 2
        assert report["sharing"]["read_by_others_bytes"] > 0


class Updating(Server):
    """``vllm serve`` with the extension, asked as the documentation says."""

    def call(self, method: str, **arguments: str) -> list[Any]:
        answer: dict[str, list[Any]] = self.post("/collective_rpc", {"method": method, "kwargs": arguments})
        return answer["results"]

    def update(self, url: str, **more: str) -> list[dict[str, Any]]:
        self.post("/pause?mode=wait")
        try:
            return self.call("s3stream_update", url=url, **more)
        finally:
            self.post("/resume")


def only_on_rank_1(models: Models) -> Fault:
    """A fault of reads that begin in the middle of the embeddings, where the second rank's half does."""
    index = json.loads((models.folder("three") / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.embed_tokens.weight"]
    content = (models.folder("three") / shard).read_bytes()
    length = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + length])["model.embed_tokens.weight"]["data_offsets"]
    middle = 8 + length + (start + end) // 2

    def refuse(request: Request, response: Response) -> Response | None:
        if request.headers.get("range", "").startswith(f"bytes={middle}-"):
            return error_response(500, "InternalError", "disk on fire")
        return None

    return Fault(refuse, key=f"three/{shard}", times=None)


def test_two_ranks_end_alike(
    scratch: Path, models: Models, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    fault = only_on_rank_1(models)
    models.server.faults = [fault]
    variables = environment(
        scratch,
        models,
        VLLM_SERVER_DEV_MODE="1",
        S3STREAM_SHARE="off",
        S3STREAM_COALESCE_GAP_BYTES="0",
        S3STREAM_HEADER_READ_BYTES="4096",
        S3STREAM_RETRY_DEADLINE_SECONDS="2",
        **serving.two_ranks(),
    )
    one = models.url("one")
    arguments = ["--tensor-parallel-size", "2", "--max-model-len", "128", "--block-size", "32"]
    arguments += ["--worker-extension-cls", "tests.vllm.sabotage.Sabotaged"]
    with Updating(one, arguments, variables, tmp_path / "log") as server, serving.nothing_left_of(server.tree):
        server.wait_until_healthy()
        assert server.complete(one, PROMPTS) == expected["one"]

        answers = server.update(models.url("two"), version="2")
        assert [answer["updated"] for answer in answers] == [True, True], answers
        assert [answer["rank"] for answer in answers] == [0, 1]
        assert server.complete(one, PROMPTS) == expected["two"]

        answers = server.update(models.url("three"))
        for answer in answers:
            assert not answer["updated"]
            assert answer["version"] == "2"
            assert answer["error_type"] == "SourceUnavailableError"
            assert "on rank 1" in answer["error"]
            assert "disk on fire" in answer["error"]
        assert server.complete(one, PROMPTS) == expected["two"]

        server.call("sabotage", rank="1", after="9", times="1")
        answers = server.update(one)
        for answer in answers:
            assert (answer["updated"], answer["lost"], answer["version"]) == (False, False, "2")
            assert "on rank 1" in answer["error"]
            assert "sabotaged" in answer["error"]
        assert server.complete(one, PROMPTS) == expected["two"]

        assert all(answer["updated"] for answer in server.update(one))
        assert server.complete(one, PROMPTS) == expected["one"]
        assert [answer["url"] for answer in server.call("s3stream_version")] == [one + "/"] * 2

        server.call("sabotage", rank="1", after="9", times="2")
        answers = server.update(models.url("two"))
        for answer in answers:
            assert (answer["updated"], answer["lost"], answer["error_type"]) == (False, True, "RollbackError")
        server.tree.wait(60.0)  # vLLM ends by itself, with status 0, when a worker has
    assert "the model's weights are a mixture; start the engine anew" in server.tree.output()
