"""Live updates of the real server on CPU: the tokens of the new weights, or those of the old ones, from all ranks."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch

from tests.conftest import ACCESS_KEY, SECRET_KEY
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.servers.s3_client import s3_client
from tests.sglang.serving import Server, engine_environment, expected_tokens, two_ranks
from tests.vllm import serving

BUCKET = "live"
#: Of files as small as these, the default for headers would take most.
HEADER_BYTES = 4096


@dataclass
class Versions:
    """Models of different weights, on disk, and the tokens that each continues the prompts with."""

    root: Path
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)

    def make(self, name: str, seed: int) -> Path:
        folder = serving.make_llama(self.root / name, seed=seed)
        serving.make_tokenizer(folder)
        self.tokens[name] = expected_tokens(folder)
        return folder


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    made = Versions(tmp_path_factory.mktemp("versions"))
    for number in (1, 2, 3):
        made.make(f"v{number}", seed=number)
    assert made.tokens["v1"] != made.tokens["v2"] != made.tokens["v3"] != made.tokens["v1"]
    return made


def with_a_wrong_shape(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    path = next(
        path for path in sorted(to.glob("*.safetensors")) if "model.norm.weight" in path.read_bytes().decode("latin-1")
    )
    tensors = safetensors.torch.load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].contiguous()
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return to


def without_a_file(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    sorted(to.glob("*.safetensors"))[-1].unlink()
    return to


def test_a_server_goes_from_version_to_version_and_stays_with_one_over_bad_ones(
    versions: Versions, moto_url: str, tmp_path: Path
) -> None:
    client = s3_client(moto_url)
    client.create_bucket(Bucket=BUCKET)
    with_a_wrong_shape(versions.root / "v3", tmp_path / "misshapen")
    without_a_file(versions.root / "v3", tmp_path / "incomplete")
    folders = [*(versions.root / name for name in versions.tokens), tmp_path / "misshapen", tmp_path / "incomplete"]
    urls = {folder.name: serving.upload(client, folder, BUCKET, folder.name) for folder in folders}
    client.close()
    environment = engine_environment(tmp_path, access_key=ACCESS_KEY, secret_key=SECRET_KEY, endpoint_url=moto_url)
    with Server(urls["v1"], ["--enable-metrics"], environment, tmp_path / "server.log", launch=True) as server:
        server.wait_until_healthy()
        assert server.complete() == versions.tokens["v1"]

        assert server.update(urls["v2"]) == (True, "Succeeded to update model weights.")
        assert server.complete() == versions.tokens["v2"]
        assert server.get("/model_info")["model_path"] == urls["v2"]
        assert f's3stream_load_success{{rank="0",url="{urls["v2"]}/"}} 1.0' in server.text("/metrics")

        success, message = server.update(urls["misshapen"])
        assert not success
        assert "model.norm.weight (F32 [127], not F32 [128])" in message
        assert f"the model that is served, from {urls['v2']}/" in message
        success, message = server.update(urls["incomplete"])
        assert not success
        assert "model-0000" in message
        assert server.complete() == versions.tokens["v2"]

        assert server.update(urls["v3"], weight_version="3") == (
            True,
            "Succeeded to update model weights. Weight version updated to 3.",
        )
        assert server.complete() == versions.tokens["v3"]


@dataclass
class Half:
    """The half of a tensor that one of two ranks reads."""

    key: str
    start: int
    end: int


def halves(folder: Path, name: str) -> tuple[Half, Half]:
    """Return what ranks 0 and 1 read of a column-parallel weight."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    key = index["weight_map"][name]
    content = (folder / key).read_bytes()
    length = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    begin, middle = 8 + length + start, 8 + length + (start + end) // 2
    return Half(key, begin, middle), Half(key, middle, 8 + length + end)


def test_what_fails_on_one_rank_changes_no_rank(versions: Versions, tmp_path: Path) -> None:
    mine, other = halves(versions.root / "v2", "model.layers.1.self_attn.q_proj.weight")
    with ObjectServer(require_signature=True) as store:
        for name in versions.tokens:
            store.put_folder(BUCKET, f"{name}/", versions.root / name)

        def covers(half: Half, name: str, since: int) -> bool:
            ranges = store.counters.ranges[since:]
            return any(f"{name}/{half.key}" == key and start <= half.start < end for key, start, end in ranges)

        def refuse(request: Request, response: Response) -> Response | None:
            """Refuse what only rank 1 asks for."""
            if not response.start <= other.start < response.start + response.count or response.start < mine.end:
                return None
            return error_response(503, "SlowDown", "Please reduce your request rate.")

        environment = {
            **engine_environment(tmp_path, access_key=ACCESS_KEY, secret_key=SECRET_KEY, endpoint_url=store.url),
            **two_ranks(),
            "S3STREAM_SHARE": "off",
            "S3STREAM_COALESCE_GAP_BYTES": "0",
            "S3STREAM_HEADER_READ_BYTES": str(HEADER_BYTES),
            "S3STREAM_RETRY_DEADLINE_SECONDS": "2",
        }
        log = tmp_path / "server.log"
        with Server(f"s3://{BUCKET}/v1", ["--tp-size", "2"], environment, log, launch=True) as server:
            server.wait_until_healthy()
            assert server.complete() == versions.tokens["v1"]

            began = len(store.counters.ranges)
            store.faults.append(Fault(refuse, key=f"v2/{other.key}", times=None))
            success, message = server.update(f"s3://{BUCKET}/v2")
            assert not success
            assert (
                f"the update to s3://{BUCKET}/v2 failed, and all ranks go back to serving s3://{BUCKET}/v1/" in message
            )
            assert f"s3://{BUCKET}/v2/{other.key} bytes {other.start}-" in message
            assert "on rank 1, " in message
            assert "SlowDown" in message
            # Rank 0 had read all that it needs of the new weights, and both read the old ones again.
            assert covers(mine, "v2", began)
            assert covers(mine, "v1", began)
            assert covers(other, "v1", began)
            assert server.complete() == versions.tokens["v1"]

            store.faults.clear()
            assert server.update(f"s3://{BUCKET}/v2")[0]
            assert server.complete() == versions.tokens["v2"]

            def lose(request: Request, response: Response) -> Response | None:
                refused = refuse(request, response)
                if refused is not None:  # and so after it was made sure that there is a way back
                    store.objects[BUCKET].pop(f"v2/{other.key}", None)
                return refused

            store.faults.append(Fault(lose, key=f"v3/{other.key}", times=None))
            with pytest.raises(OSError):  # the engine ends rather than serve a mixture
                server.update(f"s3://{BUCKET}/v3")
            server.tree.wait(60)
            output = server.tree.output()
        assert f"RollbackError: the update to s3://{BUCKET}/v3 failed (" in output
        assert f"s3://{BUCKET}/v2/ could not be loaded again (" in output


def test_ranks_of_an_engine_that_share_go_back_together(versions: Versions, tmp_path: Path) -> None:
    with ObjectServer(require_signature=True) as store:
        for name in versions.tokens:
            store.put_folder(BUCKET, f"{name}/", versions.root / name)
        index = json.loads((versions.root / "v2" / "model.safetensors.index.json").read_text())
        refused: list[str] = []

        def refuse_once(request: Request, response: Response) -> Response | None:
            if refused or response.start < HEADER_BYTES:
                return None
            refused.append(request.headers["range"])
            return error_response(403, "AccessDenied", "Access Denied")

        store.faults.append(Fault(refuse_once, key=f"v2/{index['weight_map']['lm_head.weight']}", times=None))
        results = tmp_path / "results.json"
        job = {
            "model": f"s3://{BUCKET}/v1",
            "updates": [f"s3://{BUCKET}/v2", f"s3://{BUCKET}/v2"],
            "prompts": serving.PROMPTS,
            "max_tokens": serving.MAX_TOKENS,
            "results": str(results),
        }
        environment = {
            **engine_environment(tmp_path, access_key=ACCESS_KEY, secret_key=SECRET_KEY, endpoint_url=store.url),
            **two_ranks(),
            "S3STREAM_SHARE": "require",
            "S3STREAM_HEADER_READ_BYTES": str(HEADER_BYTES),
            "S3STREAM_REPORT_DIR": str(tmp_path / "reports"),
        }
        command = [sys.executable, "-P", str(Path(__file__).with_name("engine_updates.py")), json.dumps(job)]
        with serving.ProcessTree(command, environment, tmp_path / "engine.log") as tree:
            assert tree.wait(240) == 0, tree.output()[-5000:]
    first, failed, second = json.loads(results.read_text())
    assert refused
    assert [each["success"] for each in (first, failed, second)] == [True, False, True]
    assert "all ranks go back to serving" in failed["message"]
    assert refused[0].removeprefix("bytes=").split("-")[0] in failed["message"]
    expected = [versions.tokens["v1"], versions.tokens["v1"], versions.tokens["v2"]]
    assert [each["tokens"] for each in (first, failed, second)] == expected
    reports = [r for r in serving.read_reports(tmp_path / "reports") if r["url"] == f"s3://{BUCKET}/v2/"]
    assert [report["rank"] for report in reports] == [0, 1]
    fetched = {report["sharing"]["node_fetched_bytes"] for report in reports}
    assert 0 < max(fetched) < 1.1 * reports[0]["checkpoint_bytes"]
