"""The real engine on CPU, from URLs: the tokens are those of the same checkpoint on disk, by vLLM's own loader."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ACCESS_KEY, SECRET_KEY
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.servers.s3_client import s3_client
from tests.servers.seaweed import SeaweedServer
from tests.test_minilm import SENTENCES, checkpoint_folder
from tests.vllm import serving
from tests.vllm.serving import Answer, EngineHost, Server

pytestmark = pytest.mark.skipif(not serving.has_cpu_engine(), reason="there is no vLLM for CPU")

BUCKET = "serving"
FAIL_SECONDS = 240.0  # as long as a start and a stop may take
#: Of files as small as these, the default would take most, only to read it again.
HEADER_READ_BYTES = 4096

Options = dict[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """Folders on this machine; the store has them under the same names."""

    root: Path

    def folder(self, name: str) -> Path:
        return self.root / name

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/org/{name}"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, options in {
        "tiny": Options(seed=0),
        "tiny/v2": Options(seed=1),
        "tied": Options(seed=2, embeddings="tied"),
        "tied-with-head": Options(seed=2, embeddings="tied-with-head"),
        "draft": Options(seed=3, layers=1),
    }.items():
        serving.make_llama(root / name, **options)
        if name != "tiny/v2":
            serving.make_tokenizer(root / name)
    (root / "tiny/v2/notes/deep").mkdir(parents=True)
    (root / "tiny/v2/notes/deep/read.me").write_text("nested")
    serving.make_tokenizer(root / "tokenizer", shift=7)
    serving.make_adapter(root / "adapter", root / "tiny")
    return Checkpoints(root)


@pytest.fixture(scope="module")
def moto(moto_url: str, checkpoints: Checkpoints) -> str:
    """The endpoint of a store with all checkpoints."""
    client = s3_client(moto_url)
    client.create_bucket(Bucket=BUCKET)
    serving.upload(client, checkpoints.root, BUCKET, "org")
    serving.upload(client, checkpoint_folder(), BUCKET, "org/minilm")
    client.close()
    return moto_url


@pytest.fixture(scope="module")
def seaweed_store(seaweed: SeaweedServer, checkpoints: Checkpoints) -> str:
    """The endpoint of another store, with the first checkpoint."""
    client = s3_client(seaweed.url)
    client.create_bucket(Bucket=BUCKET)
    serving.upload(client, checkpoints.folder("tiny"), BUCKET, "org/tiny")
    client.close()
    return seaweed.url


def environment(scratch: Path, endpoint_url: str | None, **more: str) -> dict[str, str]:
    return serving.engine_environment(
        scratch, access_key=ACCESS_KEY, secret_key=SECRET_KEY, endpoint_url=endpoint_url, **more
    )


@pytest.fixture(scope="module")
def host(scratch: Path, moto: str) -> Iterator[EngineHost]:
    """Makes engines of one rank."""
    with EngineHost(environment(scratch, moto), scratch / "host.log", in_process=True) as started:
        yield started


@pytest.fixture(scope="module")
def from_disk(host: EngineHost, checkpoints: Checkpoints) -> Answer:
    return host.generate(checkpoints.folder("tiny"))


def check_reports(folder: Path, url: str, *, ranks: int) -> None:
    """Check that each rank reported a complete load of its part of `url`."""
    reports = serving.read_reports(folder)
    assert [report["rank"] for report in reports] == list(range(ranks))
    for report in reports:
        assert report["url"].rstrip("/") == url
        assert set(report["expected"]) == set(report["loaded"]) != set()
        share = report["needed_bytes"] / report["checkpoint_bytes"]
        assert share == 1 if ranks == 1 else 0.4 < share < 0.6


def check_sharing(folder: Path) -> None:
    """Check that two ranks fetched the checkpoint once, both together."""
    for report in serving.read_reports(folder):
        assert report["sharing"]["ranks"] == 2
        headers = report["sharing"]["node_fetched_bytes"] - report["checkpoint_bytes"]
        assert 0 < headers < 0.05 * report["checkpoint_bytes"]
        assert report["sharing"]["read_for_others_bytes"] > 0
        assert report["sharing"]["read_by_others_bytes"] > 0


# -- one rank, several, and the server -----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["trace", "eager"])
def test_tokens_equal_those_from_disk(
    mode: str, host: EngineHost, from_disk: Answer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    url = checkpoints.url("tiny")
    options = {"mode": mode, "report_dir": str(tmp_path)}
    answer = host.generate(url, load_format="s3stream", model_loader_extra_config=options)
    assert answer.tokens == from_disk.tokens
    assert answer.served_as == url
    check_reports(tmp_path, url, ranks=1)
    assert serving.read_reports(tmp_path)[0]["mode"] == mode


def test_two_tensor_parallel_ranks_configured_by_the_engine_alone_and_their_restart(
    seaweed_store: str, scratch: Path, from_disk: Answer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """No variable names the store: the options reach the workers, in other processes, with the configuration.

    The second start runs none of the model's loading code.
    """
    variables = environment(scratch, None, **serving.two_ranks())
    assert "AWS_ENDPOINT_URL" not in variables
    url = checkpoints.url("tiny")
    outcomes = []
    for start in ("first", "second"):
        reports = tmp_path / start
        options: Options = {
            "endpoint_url": seaweed_store,
            "region": "us-east-1",
            "report_dir": str(reports),
            "header_read_bytes": HEADER_READ_BYTES,
            "plan_cache": True,
            "cache_dir": str(tmp_path / "cache"),
        }
        with (
            EngineHost(variables, tmp_path / f"{start}.log", in_process=False) as host,
            serving.nothing_left_of(host.tree),
        ):
            answer = host.generate(
                url, load_format="s3stream", tensor_parallel_size=2, model_loader_extra_config=options
            )
            assert host.close() == 0, host.tree.output()
        assert answer.tokens == from_disk.tokens
        check_reports(reports, url, ranks=2)
        check_sharing(reports)
        outcomes.append([report["plan_cache"]["outcome"] for report in serving.read_reports(reports)])
    assert outcomes == [["kept", "kept"], ["used", "used"]]


def test_two_pipeline_stages(
    moto: str, scratch: Path, from_disk: Answer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    variables = environment(scratch, moto, S3STREAM_REPORT_DIR=str(tmp_path / "reports"), **serving.two_ranks())
    # On CPU, vLLM makes the buffers between stages when it warms up for compilation, and only then.
    compilation: Options = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
    url = checkpoints.url("tiny")
    with EngineHost(variables, tmp_path / "log", in_process=False) as host, serving.nothing_left_of(host.tree):
        answer = host.generate(url, load_format="s3stream", pipeline_parallel_size=2, **compilation)
        assert host.close() == 0, host.tree.output()
    assert answer.tokens == from_disk.tokens
    check_reports(tmp_path / "reports", url, ranks=2)


@pytest.mark.parametrize(("ranks", "where"), [(1, "moto"), (2, "seaweed_store")])
def test_served_from_a_url(
    ranks: int,
    where: str,
    request: pytest.FixtureRequest,
    scratch: Path,
    host: EngineHost,
    from_disk: Answer,
    checkpoints: Checkpoints,
    tmp_path: Path,
) -> None:
    assert importlib.util.find_spec("runai_model_streamer") is None, "it would serve s3:// URLs in our place"
    variables = environment(
        scratch,
        request.getfixturevalue(where),
        S3STREAM_REPORT_DIR=str(tmp_path / "reports"),
        S3STREAM_HEADER_READ_BYTES=str(HEADER_READ_BYTES),
        HF_HUB_OFFLINE="0",  # as users have it: nothing of a URL is looked up at the hub
        S3STREAM_METRICS_FILE=str(tmp_path / "s3stream-{rank}.prom"),
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "metrics"),
        **(serving.two_ranks() if ranks > 1 else {}),
    )
    (tmp_path / "metrics").mkdir()
    url = checkpoints.url("tiny")
    arguments, names = ["--tensor-parallel-size", str(ranks)], [url]
    if ranks == 1:
        adapter = f"adapter={checkpoints.url('adapter')}"
        arguments += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapter]
        names.append("adapter")
    server = Server(url, arguments, variables, tmp_path / "log")
    with server, serving.nothing_left_of(server.tree):
        server.wait_until_healthy()
        assert server.complete(url) == from_disk.tokens[0]
        assert [model["id"] for model in server.get("/v1/models")["data"]] == names
        metrics = server.text("/metrics")
        for rank in range(ranks):
            loaded = f's3stream_load_success{{rank="{rank}",url="{url}/"}} 1.0'
            assert loaded in metrics, [line for line in metrics.splitlines() if "s3stream" in line]
            assert "s3stream_load_success" in (tmp_path / f"s3stream-{rank}.prom").read_text()
        if ranks == 1:
            local: Options = {"enable_lora": True, "max_lora_rank": 8, "adapters": [str(checkpoints.folder("adapter"))]}
            expected = host.generate(checkpoints.folder("tiny"), **local)
            assert server.complete("adapter") == expected.tokens[0] != from_disk.tokens[0]
        # There is something that could be left behind.
        assert len(server.tree.alive()) > ranks
        assert server.tree.shared_memory()
        assert server.terminate() == 0, server.tree.output()
    check_reports(tmp_path / "reports", url, ranks=ranks)
    if ranks == 2:
        check_sharing(tmp_path / "reports")


# -- what else URLs may name ---------------------------------------------------------------------------


def test_revision_and_tokenizer_of_other_folders(host: EngineHost, from_disk: Answer, checkpoints: Checkpoints) -> None:
    tokenizer = checkpoints.folder("tokenizer")
    expected = host.generate(checkpoints.folder("tiny/v2"), tokenizer=str(tokenizer))
    assert expected.prompts != from_disk.prompts
    assert expected.tokens != from_disk.tokens
    answer = host.generate(
        checkpoints.url("tiny"), revision="v2", tokenizer=checkpoints.url("tokenizer"), load_format="s3stream"
    )
    assert answer.prompts == expected.prompts
    assert answer.tokens == expected.tokens
    assert answer.served_as == checkpoints.url("tiny")
    assert (answer.folder / "notes/deep/read.me").read_text() == "nested"
    assert not list(answer.folder.rglob("*.safetensors"))


def test_tied_embeddings(host: EngineHost, checkpoints: Checkpoints) -> None:
    """Without a head, and with one that is not the embeddings, which newer versions of vLLM use."""
    for name in ("tied", "tied-with-head"):
        expected = host.generate(checkpoints.folder(name))
        assert host.generate(checkpoints.url(name), load_format="s3stream").tokens == expected.tokens, name


def test_embedding_model(host: EngineHost, checkpoints: Checkpoints) -> None:
    expected = host.embed(checkpoint_folder(), SENTENCES)
    assert [len(embedding) for embedding in expected.embeddings] == [384] * len(SENTENCES)
    answer = host.embed(checkpoints.url("minilm"), SENTENCES, load_format="s3stream")
    assert answer.embeddings == expected.embeddings
    assert (answer.folder / "1_Pooling/config.json").is_file()


def test_adapter_at_a_url(host: EngineHost, checkpoints: Checkpoints) -> None:
    adapters = [None, str(checkpoints.folder("adapter")), checkpoints.url("adapter")]
    answer = host.generate(
        checkpoints.url("tiny"), load_format="s3stream", enable_lora=True, max_lora_rank=8, adapters=adapters
    )
    without, local, remote = answer.tokens
    assert remote == local
    assert remote != without


def test_draft_model_at_a_url(host: EngineHost, from_disk: Answer, checkpoints: Checkpoints, tmp_path: Path) -> None:
    answer = host.generate(
        checkpoints.url("tiny"),
        load_format="s3stream",
        speculative_config={"method": "draft_model", "model": checkpoints.url("draft"), "num_speculative_tokens": 2},
        model_loader_extra_config={"report_dir": str(tmp_path)},
    )
    assert answer.tokens == from_disk.tokens
    reports = {report["url"].rstrip("/"): report for report in serving.read_reports(tmp_path)}
    assert set(reports) == {checkpoints.url("tiny"), checkpoints.url("draft")}
    for report in reports.values():
        assert set(report["loaded"]) == set(report["expected"])
        assert report["needed_bytes"] == report["checkpoint_bytes"]


# -- failures ------------------------------------------------------------------------------------------


def fail(model: str, arguments: list[str], variables: dict[str, str], tmp_path: Path) -> str:
    """Start a server that cannot come up; check that it goes away entirely, and return what it printed."""
    with Server(model, arguments, variables, tmp_path / "log") as server, serving.nothing_left_of(server.tree):
        assert server.tree.wait(FAIL_SECONDS) > 0, server.tree.output()
    return server.tree.output()


def test_missing_bucket(moto: str, scratch: Path, tmp_path: Path) -> None:
    output = fail("s3://no-such-bucket/org/tiny", [], environment(scratch, moto), tmp_path)
    assert "ObjectNotFoundError: s3://no-such-bucket/org/tiny" in output


def test_misspelt_option(moto: str, scratch: Path, checkpoints: Checkpoints, tmp_path: Path) -> None:
    arguments = ["--model-loader-extra-config", json.dumps({"modee": "eager"})]
    output = fail(checkpoints.url("tiny"), arguments, environment(scratch, moto), tmp_path)
    assert "unknown option 'modee' (did you mean mode?)" in output
    assert "EngineCore" not in output, "it started an engine first"


@pytest.fixture
def failing(server: ObjectServer, checkpoints: Checkpoints) -> ObjectServer:
    """A store of the first checkpoint, to inject faults into."""
    server.put_folder(BUCKET, "org/tiny/", checkpoints.folder("tiny"))
    return server


def shard_of(checkpoints: Checkpoints, tensor: str) -> str:
    index = json.loads((checkpoints.folder("tiny") / "model.safetensors.index.json").read_text())
    return str(index["weight_map"][tensor])


def test_one_of_two_ranks_cannot_read(
    failing: ObjectServer, scratch: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Only the last stage wants the head; the other is done loading then, and must not wait for ever."""
    shard = shard_of(checkpoints, "lm_head.weight")

    def refuse_weights(request: Request, response: Response) -> Response | None:
        if request.headers.get("range", "").startswith("bytes=0-"):
            return None  # the header
        refused = error_response(500, "InternalError", "disk on fire")
        refused.delay_seconds = 2.0  # the other rank is done by then
        return refused

    failing.faults = [Fault(refuse_weights, key=shard, times=None)]
    variables = environment(
        scratch,
        failing.url,
        S3STREAM_RETRY_ATTEMPTS="2",
        S3STREAM_RETRY_FIRST_WAIT_SECONDS="0.05",
        S3STREAM_RETRY_LONGEST_WAIT_SECONDS="0.1",
        S3STREAM_REPORT_DIR=str(tmp_path / "reports"),
        **serving.two_ranks(),
    )
    output = fail(checkpoints.url("tiny"), ["--pipeline-parallel-size", "2"], variables, tmp_path)
    assert f"{checkpoints.url('tiny')}/{shard} bytes" in output
    assert "disk on fire" in output
    assert "2 attempts" in output
    assert [report["rank"] for report in serving.read_reports(tmp_path / "reports")] == [0]


def test_a_range_that_cannot_be_read_fails_both_ranks_that_share(
    failing: ObjectServer, scratch: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """One of them asks for it; the other has its part of the reads, and must neither wait nor go on."""
    shard = shard_of(checkpoints, "lm_head.weight")
    asked: list[str] = []

    def refuse_one_range(request: Request, response: Response) -> Response | None:
        wanted = request.headers.get("range", "")
        if wanted.startswith("bytes=0-"):
            return None  # the header
        asked.append(wanted)
        return error_response(500, "InternalError", "disk on fire") if wanted == asked[0] else None

    failing.faults = [Fault(refuse_one_range, key=shard, times=None)]
    variables = environment(
        scratch,
        failing.url,
        S3STREAM_SHARE="require",
        S3STREAM_RETRY_ATTEMPTS="3",
        S3STREAM_RETRY_FIRST_WAIT_SECONDS="0.05",
        S3STREAM_RETRY_LONGEST_WAIT_SECONDS="0.1",
        S3STREAM_REPORT_DIR=str(tmp_path / "reports"),
        **serving.two_ranks(),
    )
    output = fail(checkpoints.url("tiny"), ["--tensor-parallel-size", "2"], variables, tmp_path)
    assert asked.count(asked[0]) == 3
    start, end = asked[0].removeprefix("bytes=").split("-")
    what = re.escape(f"SourceUnavailableError: {checkpoints.url('tiny')}/{shard} bytes {start}-{end}: ")
    said = dict(re.findall(rf"\(Worker_TP(\d) .*{what}(on rank \d, |)the store kept refusing: disk on fire", output))
    assert said in ({"0": "", "1": "on rank 0, "}, {"1": "", "0": "on rank 1, "})
    assert not (tmp_path / "reports").exists()


def test_shard_replaced_before_the_workers_read_it(
    failing: ObjectServer, scratch: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    shard = shard_of(checkpoints, "lm_head.weight")

    def replace(request: Request, response: Response) -> None:
        content = (checkpoints.folder("tiny") / shard).read_bytes()
        failing.put(BUCKET, f"org/tiny/{shard}", content[:-1] + bytes([content[-1] ^ 1]))  # of the same size

    # Everything has been listed when the first file is read, which is not kept from another test.
    failing.faults = [Fault(replace, key="config.json")]
    variables = environment(scratch, failing.url, S3STREAM_CACHE_DIR=str(tmp_path / "cache"))
    output = fail(checkpoints.url("tiny"), [], variables, tmp_path)
    assert f"ObjectChangedError: {checkpoints.url('tiny')}/{shard}" in output
