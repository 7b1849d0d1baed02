"""Metrics and reports of loads that succeed and loads that fail, as others read them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import streamer
from streamer.errors import ConfigError, MissingParametersError, SourceError
from streamer.metrics import METRICS, Failure, LoadOutcome, exposition
from streamer.recording import recording
from tests.files import entry, raw_file
from tests.servers.object_server import Fault, ObjectServer, error_response
from tests.share.together import Meeting, ThreadGroup

ROOT = Path(__file__).parent.parent.parent
BODY = bytes(range(256)) * 1024
QUICK = {"retry_attempts": 2, "retry_first_wait_seconds": 0.01}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Net(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("a",):
            self.register_buffer(name, torch.zeros(len(BODY), dtype=torch.uint8))


@pytest.fixture
def store(server: ObjectServer) -> ObjectServer:
    server.put("bucket", "m/model.safetensors", raw_file({"a": entry("U8", [len(BODY)], 0, len(BODY))}, BODY))
    return server


def read(path: Path) -> Samples:
    """Parse as Prometheus does; labels other than url and rank."""
    found: Samples = {}
    for family in text_string_to_metric_families(path.read_text()):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            others = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("url", "rank")))
            assert (sample.name, others) not in found
            found[sample.name, others] = sample.value
    return found


def load(store: ObjectServer, model: torch.nn.Module, **options: object) -> streamer.LoadReport:
    return streamer.load(model, "s3://bucket/m", {"endpoint_url": store.url, **QUICK, **options})


def test_a_load_in_numbers(store: ObjectServer, tmp_path: Path) -> None:
    store.faults = [Fault(lambda *_: error_response(503, "SlowDown"), times=1)]
    path, report_path = tmp_path / "new" / "{model}-{rank}.prom", tmp_path / "report.json"
    report = load(store, Net(), metrics_file=str(path), report_file=str(report_path))
    found = read(tmp_path / "new" / "m-0.prom")
    assert {name for name, _ in found} == {metric.name for metric in METRICS} - {"s3stream_load_failure"}
    assert found["s3stream_load_success", ()] == 1
    assert found["s3stream_load_requests", ()] == report.requests
    assert found["s3stream_load_retries", ()] == found["s3stream_load_throttles", ()] == 1
    assert found["s3stream_load_bytes", (("kind", "fetched"),)] == report.fetched_bytes == len(BODY)
    assert found["s3stream_load_bytes", (("kind", "checkpoint"),)] == len(BODY)
    assert found["s3stream_load_peak_buffer_bytes", ()] == report.peak_buffer_bytes
    for phase in ("headers", "trace", "plan", "fetch", "copy"):
        assert found["s3stream_load_phase_seconds", (("phase", phase),)] == getattr(report.times, phase)
    assert found["s3stream_load_duration_seconds", ()] >= report.times.total
    assert abs(found["s3stream_load_end_timestamp_seconds", ()] - report_path.stat().st_mtime) < 60
    document = json.loads(report_path.read_text())
    assert document["ok"] is True
    assert document["rank"] == 0
    assert document["fetched_bytes"] == len(BODY)
    assert sorted(os.listdir(tmp_path / "new")) == ["m-0.prom"], "nothing unfinished is left"
    assert stat.S_IMODE(report_path.stat().st_mode) & 0o044, "another user's collector can read it"


def test_the_next_load_replaces_the_last(store: ObjectServer, tmp_path: Path) -> None:
    path = tmp_path / "s3stream.prom"
    store.faults = [Fault(lambda *_: error_response(403, "AccessDenied"), times=1)]
    with pytest.raises(SourceError):
        load(store, Net(), metrics_file=str(path))
    assert read(path)["s3stream_load_success", ()] == 0
    load(store, Net(), metrics_file=str(path))
    assert read(path)["s3stream_load_success", ()] == 1
    assert not any(name == "s3stream_load_failure" for name, _ in read(path))


@pytest.mark.parametrize(
    ("where", "error", "phase"),
    [
        ("LIST", "AccessDeniedError", "headers"),
        ("weights", "AccessDeniedError", "weights"),
        ("missing", "MissingParametersError", "check"),
    ],
)
def test_a_failed_load_says_of_what(store: ObjectServer, tmp_path: Path, where: str, error: str, phase: str) -> None:
    skip = 1 if where == "weights" else 0  # the header comes first
    if where != "missing":
        kind = "LIST" if where == "LIST" else "GET"
        store.faults = [Fault(lambda *_: error_response(403, "AccessDenied"), method=kind, skip=skip, times=None)]
    model = Net("a", "absent") if where == "missing" else Net()
    options = {"metrics_file": str(tmp_path / "m.prom"), "report_file": str(tmp_path / "r.json")}
    with pytest.raises((SourceError, MissingParametersError)):
        load(store, model, header_read_bytes=4096, **options)
    found = read(tmp_path / "m.prom")
    assert found["s3stream_load_success", ()] == 0
    assert found["s3stream_load_failure", (("error", error), ("phase", phase))] == 1
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["ok"] is False
    assert (document["failure"]["error"], document["failure"]["phase"]) == (error, phase)
    assert document["url"] == "s3://bucket/m/"
    requests = {"LIST": 0, "weights": 2, "missing": 2}[where]
    assert found["s3stream_load_requests", ()] == document["requests"] == requests
    received = {"LIST": 0, "weights": 4096, "missing": len(BODY)}[where]
    assert found["s3stream_load_bytes", (("kind", "fetched"),)] == received
    assert ("s3stream_load_peak_buffer_bytes", ()) in found or where != "missing"


def test_ranks_have_files_of_their_own(store: ObjectServer, tmp_path: Path) -> None:
    options = {"endpoint_url": store.url, "metrics_file": str(tmp_path / "s3stream.prom"), **QUICK}

    meeting = Meeting(2)

    def one(rank: int) -> streamer.LoadReport:
        return streamer.load(Net(), "s3://bucket/m", options, group=ThreadGroup(rank, meeting))

    with ThreadPoolExecutor(2) as threads:
        assert all(report.sharing for report in threads.map(one, range(2)))
    assert sorted(os.listdir(tmp_path)) == ["s3stream.prom", "s3stream.rank1.prom"]
    assert 'rank="1"' in (tmp_path / "s3stream.rank1.prom").read_text()
    shared = read(tmp_path / "s3stream.rank1.prom")
    assert ("s3stream_load_bytes", (("kind", "node_fetched"),)) in shared


@pytest.mark.parametrize(
    ("pattern", "why"), [("{tmp}/file/x.prom", "cannot write"), ("{tmp}", "is a folder"), ("{node}.prom", "{node}")]
)
def test_files_that_cannot_be_written_are_noticed_first(
    store: ObjectServer, tmp_path: Path, pattern: str, why: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=why):
        load(store, Net(), metrics_file=pattern.replace("{tmp}", str(tmp_path)))
    assert not store.counters.requests


def test_a_failed_load_outweighs_a_file_that_cannot_be_written(
    store: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"

    def vanish(*_: object) -> object:
        folder.rmdir()
        folder.write_text("in the way")
        return error_response(403, "AccessDenied")

    store.faults = [Fault(vanish, method="LIST")]  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="access denied"):
        load(store, Net(), metrics_file=str(folder / "m.prom"))
    assert "cannot write" in caplog.text
    assert "metrics_file" in caplog.text


def test_labels_hold_no_secret_and_are_escaped(tmp_path: Path) -> None:
    config = streamer.StreamConfig(metrics_file=str(tmp_path / "m.prom"))
    with pytest.raises(KeyError), recording(config, "https://user:hunter2@host/m?sig=hunter3", 3):
        raise KeyError("x")
    text = (tmp_path / "m.rank3.prom").read_text()
    assert "hunter" not in text
    assert 'url="https://host/m",rank="3"' in text
    odd = 'a"b\\c\nd'
    outcome = LoadOutcome(
        url=odd, rank=0, ended_at=1.0, seconds=2.0, failure=Failure(error="E", message="m", phase="open")
    )
    (family, *_) = text_string_to_metric_families(exposition(outcome))
    assert family.samples[0].labels["url"] == odd


def test_workers_reach_the_metrics_of_the_engine(tmp_path: Path) -> None:
    """As in vLLM: another process than the one that loads serves what is in the folder."""
    code = (
        "from streamer.metrics import *; from streamer.rank_reports import publish_metrics\n"
        "import sys\n"
        "for seconds in (5.0, 7.0):\n"
        "    publish_metrics(LoadOutcome(url='s3://b/m/', rank=int(sys.argv[1]), ended_at=1.0, seconds=seconds))\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}:{os.environ.get('PYTHONPATH', '')}"}
    for rank in ("0", "1"):
        subprocess.run(
            [sys.executable, "-c", code, rank],
            check=True,
            env={**environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        )
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call,unused-ignore]
    text = generate_latest(registry).decode()
    for rank in ("0", "1"):
        assert f's3stream_load_duration_seconds{{rank="{rank}",url="s3://b/m/"}} 7.0' in text
    gone = {**environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "gone")}
    done = subprocess.run([sys.executable, "-c", code, "0"], capture_output=True, text=True, env=gone)
    assert done.returncode == 0, done.stderr
    assert "PROMETHEUS_MULTIPROC_DIR: No such file" in done.stderr
