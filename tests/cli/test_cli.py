"""The command line, run as users run it: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamer.cli.exit_codes import EXIT_CODES
from tests.files import entry, raw_file
from tests.servers.object_server import Fault, ObjectServer, error_response
from tests.sparse import LLAMA_3_70B, llama_3_70b, write_sparse

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "s3stream"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def run_json(*arguments: str, **environ: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*arguments, "--json", code=0, **environ).stdout)
    return document


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sparse files with the headers of Llama-3-70B: 723 tensors, 141 GB of holes."""
    folder = tmp_path_factory.mktemp("llama-70b")
    write_sparse(folder, llama_3_70b(), LLAMA_3_70B)
    return folder


def test_plan_of_llama_70b_from_headers_alone(llama_70b: Path) -> None:
    plan = run_json("plan", f"file://{llama_70b}", "--tp", "8", "--rank", "3", "--engine", "reference")
    assert plan["checkpoint_bytes"] == 141_107_412_992
    (rank,) = plan["ranks"]
    assert rank["rank"] == 3
    assert rank["needed_bytes"] == 17_640_734_720
    assert rank["copies"] == 723
    assert rank["strided_bytes"] == 6_039_797_760
    assert plan["share"]
    assert plan["node_bytes"] == plan["checkpoint_bytes"], "a node fetches each byte once"
    assert rank["fetch_bytes"] == pytest.approx(plan["checkpoint_bytes"] / 8, rel=0.001)
    assert rank["over_read_bytes"] == 0
    assert plan["node_bytes_unshared"] > 3 * plan["node_bytes"]
    assert plan["floor_seconds"]["100_gbit"] == pytest.approx(plan["node_bytes"] * 8 / 100e9, abs=1e-3)
    assert plan["materialised"] == plan["ignored"] == []


def test_plan_of_ranks_that_do_not_share(llama_70b: Path) -> None:
    plan = run_json("plan", str(llama_70b), "--tp", "4", "--rank", "3", "--option", "share=off")
    (rank,) = plan["ranks"]
    assert not plan["share"]
    assert rank["fetch_bytes"] == rank["needed_bytes"] + rank["over_read_bytes"]
    assert plan["node_bytes"] == plan["node_bytes_unshared"] > 1.5 * plan["checkpoint_bytes"]


def test_explain_names_the_rows(llama_70b: Path) -> None:
    name = "model.layers.40.self_attn.k_proj.weight"
    text = run("explain", str(llama_70b), name, "--tp", "8", "--rank", "3").stdout
    assert "rows 384 to 511 go to rows 1024 to 1151 of model.layers.40.self_attn.qkv_proj.weight" in text
    document = run_json("explain", str(llama_70b), name, "--tp", "8")
    assert [copy["rank"] for copy in document["copies"]] == list(range(8))
    assert document["copies"][3]["source"] == [[384, 512], [0, 8192]]
    assert document["copies"][3]["destination"] == [[1024, 1152], [0, 8192]]
    assert document["copies"][3]["parameter"] == "model.layers.40.self_attn.qkv_proj.weight"
    text = run("explain", str(llama_70b), "model.layers.7.mlp.down_proj.weight", "--tp", "4", "--rank", "1").stdout
    assert "columns 7168 to 14335 go to all rows of model.layers.7.mlp.down_proj.weight" in text


def test_explain_of_an_unknown_tensor_names_the_nearest(llama_70b: Path) -> None:
    done = run("explain", str(llama_70b), "model.layers.40.self_attn.kproj.weight", code=2)
    assert "did you mean model.layers.40.self_attn.k_proj.weight?" in done.stderr


def test_plan_for_people(llama_70b: Path) -> None:
    text = run("plan", str(llama_70b), "--tp", "8").stdout
    assert "17.64 GB" in text
    assert "the node fetches 141.11 GB, 1.00 times the checkpoint's 141.11 GB" in text
    assert "on their own they would fetch 477.60 GB" in text


def test_inspect(server: ObjectServer) -> None:
    server.put(
        "bucket",
        "m/model.safetensors",
        raw_file({"a": entry("F32", [2], 0, 8), "b": entry("U8", [3], 8, 11)}, bytes(11)),
    )
    server.put("bucket", "m/config.json", b"{}")
    server.put("bucket", "m/.git/x", b"xyz")
    server.put("bucket", "m/pytorch_model.bin", b"pickle")
    found = run_json("inspect", "s3://bucket/m", "--endpoint-url", server.url)
    assert [(file["key"], file["tensors"]) for file in found["files"]] == [("model.safetensors", 2)]
    assert (found["tensors"], found["bytes"], found["dtypes"]) == (2, 11, {"F32": 8, "U8": 3})
    assert found["skipped"] == [
        {"key": ".git/x", "size": 3, "reason": "inside .git/"},
        {"key": "pytorch_model.bin", "size": 6, "reason": "pickled weights are never opened"},
    ]
    assert [item["key"] for item in found["metadata_files"]] == ["config.json"]
    text = run("inspect", "s3://bucket/m", S3STREAM_ENDPOINT_URL=server.url).stdout
    assert "2 tensors, 11 bytes (F32 8 bytes, U8 3 bytes)" in text
    assert "pickled weights are never opened" in text


@pytest.mark.parametrize("tp", [2, 4])
def test_demo(tp: int) -> None:
    done = run("demo", "--tp", str(tp), "--json")
    demo = json.loads(done.stdout)
    assert demo["ok"] is True
    assert demo["tp"] == tp
    assert demo["max_abs_logit_diff"] < 1e-4
    assert [rank["rank"] for rank in demo["ranks"]] == list(range(tp))
    assert all(rank["needed_bytes"] == rank["parameter_bytes"] for rank in demo["ranks"])
    assert sum(rank["fetched_bytes"] for rank in demo["ranks"]) == demo["node_fetched_bytes"]
    assert demo["checkpoint_bytes"] > max(rank["needed_bytes"] for rank in demo["ranks"])
    assert demo["seconds"] > 0
    assert "X-Amz-Signature" not in done.stderr


def test_demo_refuses_sizes_that_cannot_be_split() -> None:
    assert "cannot be split over 3 ranks" in run("demo", "--tp", "3", code=2).stderr


def test_bad_input_ends_in_one_message_and_its_code(server: ObjectServer, tmp_path: Path) -> None:
    good = raw_file({"a": entry("F32", [2], 0, 8)}, bytes(8))
    server.put("bucket", "m/model.safetensors", good)
    server.put("bucket", "truncated/model.safetensors", good[:-3])
    server.put("bucket", "pickle/pytorch_model.bin", b"x")
    endpoint = ("--endpoint-url", server.url)
    no_keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}

    def message(code: int, *arguments: str, **environ: str) -> str:
        done = run(*arguments, code=code, **environ)
        assert done.stdout == ""
        lines = [line for line in done.stderr.splitlines() if not line.startswith("reading headers")]
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("s3stream: ")
        return lines[0]

    assert "no such bucket" in message(4, "inspect", "s3://missing/m", *endpoint)
    assert "there is s3://bucket/truncated/" in message(4, "inspect", "s3://bucket/trunc", *endpoint)
    assert "there are no objects here" in message(4, "inspect", "s3://bucket/none", *endpoint)
    assert "no credentials were found" in message(5, "inspect", "s3://bucket/m", *endpoint, **no_keys)
    assert "truncated" in message(3, "inspect", "s3://bucket/truncated", *endpoint)
    assert "only pickled weights" in message(3, "inspect", "s3://bucket/pickle", *endpoint)
    assert "did you mean concurrency?" in message(2, "inspect", "s3://bucket/m", *endpoint, "-o", "concurency=3")
    assert "has no value" in message(2, "inspect", "s3://bucket/m", *endpoint, "-o", "concurrency")
    assert "S3STREAM_NOPE" in message(2, "inspect", "s3://bucket/m", *endpoint, S3STREAM_NOPE="1")
    assert "no such folder" in message(4, "inspect", str(tmp_path / "nowhere"))
    assert "no config.json" in message(3, "plan", "s3://bucket/m", *endpoint)
    assert "no engine 'nope'" in message(2, "plan", "s3://bucket/m", *endpoint, "--engine", "nope")
    assert "there is no rank 2 among 2" in message(2, "plan", "s3://bucket/m", *endpoint, "--tp", "2", "--rank", "2")
    server.faults = [Fault(lambda *_: error_response(403, "AccessDenied"), method="LIST", times=None)]
    assert "needs s3:ListBucket" in message(5, "inspect", "s3://bucket/m", *endpoint)
    server.close()
    quick = ("-o", "retry_attempts=2", "-o", "retry_first_wait_seconds=0.01")
    assert "2 attempts" in message(6, "inspect", "s3://bucket/m", *endpoint, *quick)


def test_usage_errors_and_help() -> None:
    assert "No such command" in run("nonsense", code=2).stderr
    assert run("--version").stdout.startswith("s3stream 0.")
    for command in ("demo", "inspect", "fetch", "doctor", "bench", "plan", "explain"):
        assert "--json" in run(command, "--help", COLUMNS="200", NO_COLOR="1", TERM="dumb").stdout


def test_progress_is_plain_lines_away_from_a_terminal_and_can_be_silenced(llama_70b: Path) -> None:
    done = run("plan", str(llama_70b), "--tp", "2", "--json")
    assert "tracing ranks: 2 of 2\n" in done.stderr
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr
    assert run("plan", str(llama_70b), "--tp", "2", "--json", "--quiet").stderr == ""


def test_progress_is_a_bar_on_a_terminal(llama_70b: Path) -> None:
    ours, theirs = pty.openpty()
    command = [str(Path(sys.executable).parent / "s3stream"), "plan", str(llama_70b), "--tp", "4", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # how a pty says that the other side is closed
            break
        if not data:
            break
        seen += data
    assert process.stdout is not None
    with process.stdout:
        json.loads(process.stdout.read())
    assert process.wait() == 0
    os.close(ours)
    assert "━".encode() in seen


def test_without_typer_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['s3stream', 'inspect', 'x']\n"
        "from streamer.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 9
    assert done.stderr == "s3stream: the command line needs the package typer; run: pip install 's3stream[cli]'\n"


def test_exit_codes_are_documented_in_the_readme() -> None:
    table = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {str(code) for _, code, _ in EXIT_CODES} | {"0", "1"} <= set(table)
    for _, code, meaning in EXIT_CODES:
        assert meaning in table[str(code)]
