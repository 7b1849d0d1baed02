"""The real server on CPU, from URLs: its tokens are those of Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ACCESS_KEY, SECRET_KEY
from tests.servers.s3_client import s3_client
from tests.sglang.serving import Server, engine_environment, expected_tokens, two_ranks
from tests.vllm import serving

BUCKET = "sglang"


@dataclass(frozen=True)
class Store:
    """A store with a model, and the same on disk.

    Attributes:
        tokens: that Transformers continues the prompts with.
    """

    endpoint_url: str
    scratch: Path
    folder: Path
    url: str
    tokens: list[list[int]]

    def environment(self) -> dict[str, str]:
        return engine_environment(
            self.scratch, access_key=ACCESS_KEY, secret_key=SECRET_KEY, endpoint_url=self.endpoint_url
        )


@pytest.fixture(scope="module")
def store(moto_url: str, tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    serving.make_llama(folder, seed=0)
    serving.make_tokenizer(folder)
    client = s3_client(moto_url)
    client.create_bucket(Bucket=BUCKET)
    url = serving.upload(client, folder, BUCKET, "org/tiny")
    client.close()
    return Store(moto_url, tmp_path_factory.mktemp("serving"), folder, url, expected_tokens(folder))


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_of_transformers(store: Store, tmp_path: Path, ranks: int) -> None:
    # Of files as small as these, the default for headers would take most, only to read it again.
    options = {
        "S3STREAM_REPORT_DIR": str(tmp_path / "reports"),
        "S3STREAM_HEADER_READ_BYTES": "4096",
        "S3STREAM_PLAN_CACHE": "yes",
    }
    environment = {**store.environment(), **options}
    arguments: Sequence[str] = ["--enable-metrics"]
    if ranks == 2:
        environment.update(two_ranks())
        arguments = [*arguments, "--tp-size", "2"]
    with Server(store.url, arguments, environment, tmp_path / "server.log") as server:
        server.wait_until_healthy()
        assert server.complete() == store.tokens
        information: dict[str, Any] = server.get("/server_info")
        assert information["load_format"] == "s3stream"
        assert information["served_model_name"] == store.url
        output = server.tree.output()
        metrics = server.text("/metrics")
    assert output.count("s3stream: ") >= ranks
    for rank in range(ranks):
        assert f's3stream_load_success{{rank="{rank}",url="{store.url}/"}} 1.0' in metrics
    reports = serving.read_reports(tmp_path / "reports")
    assert [report["rank"] for report in reports] == list(range(ranks))
    for report in reports:
        assert report["url"].rstrip("/") == store.url
        assert set(report["expected"]) == set(report["loaded"]) != set()
        assert 1 / ranks <= report["needed_bytes"] / report["checkpoint_bytes"] < 1 / ranks + 0.1
    if ranks == 2:
        fetched = {report["sharing"]["node_fetched_bytes"] for report in reports}
        assert max(fetched) < 1.1 * reports[0]["checkpoint_bytes"]
        options["S3STREAM_REPORT_DIR"] = str(tmp_path / "again")
        with Server(store.url, arguments, {**environment, **options}, tmp_path / "again.log") as server:
            server.wait_until_healthy()
            assert server.complete() == store.tokens
        for report in serving.read_reports(tmp_path / "again"):
            assert report["plan_cache"]["outcome"] == "used"
