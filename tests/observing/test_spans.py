"""Spans of loads, as an exporter of OpenTelemetry's SDK gets them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import streamer
from streamer.errors import SourceError
from tests.files import entry, raw_file
from tests.servers.object_server import Fault, ObjectServer, error_response

ROOT = Path(__file__).parent.parent.parent
COUNT = 1 << 18
OPTIONS = {"retry_attempts": 2, "retry_first_wait_seconds": 0.01, "buffer_bytes": "1MiB"}


class Net(torch.nn.Module):
    """Takes another dtype than the checkpoint has, so that there is something to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(COUNT, dtype=torch.float64))


@pytest.fixture
def store(server: ObjectServer) -> ObjectServer:
    body = bytes(4 * COUNT)
    server.put("bucket", "m/model.safetensors", raw_file({"a": entry("F32", [COUNT], 0, 4 * COUNT)}, body))
    return server


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The process's own provider can be set once only, and is not ours to set."""
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield kept
    provider.shutdown()


def by_name(spans: Sequence[ReadableSpan]) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in spans:
        found.setdefault(span.name.removeprefix("s3stream."), []).append(span)
    return found


def bounds(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def test_a_load_in_spans(store: ObjectServer, exporter: InMemorySpanExporter) -> None:
    with trace.get_tracer("the engine").start_as_current_span("engine start"):
        report = streamer.load(Net(), "s3://bucket/m", {"endpoint_url": store.url, **OPTIONS})
    found = by_name(exporter.get_finished_spans())
    assert set(found) == {"engine start", "load", "headers", "trace", "plan", "fetch", "copy"}
    (load,), (engine,) = found["load"], found["engine start"]
    assert load.parent is not None
    assert load.parent.span_id == engine.context.span_id
    parents = {"headers": "load", "trace": "load", "plan": "trace", "fetch": "trace", "copy": "fetch"}
    for name, parent in parents.items():
        for span in found[name]:
            assert span.parent is not None
            assert span.parent.span_id in {one.context.span_id for one in found[parent]}, name
            (above,) = [one for one in found[parent] if one.context.span_id == span.parent.span_id]
            assert bounds(above)[0] <= bounds(span)[0] <= bounds(span)[1] <= bounds(above)[1] + 1_000_000, name
    attributes = dict(load.attributes or {})
    assert attributes == {
        "s3stream.url": "s3://bucket/m/",
        "s3stream.rank": 0,
        "s3stream.mode": "trace",
        "s3stream.bytes": 4 * COUNT,
        "s3stream.requests": report.requests,
        "s3stream.retries": 0,
    }
    fetched = [dict(span.attributes or {}) for span in found["fetch"]]
    assert sum(int(str(one["s3stream.bytes"])) for one in fetched) == 4 * COUNT
    copied = sum(float(str(dict(span.attributes or {})["s3stream.seconds"])) for span in found["copy"])
    assert copied == pytest.approx(report.times.copy)


def test_a_failed_load_is_marked(
    store: ObjectServer, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.faults = [Fault(lambda *_: error_response(403, "AccessDenied"), method="LIST", times=None)]
    with pytest.raises(SourceError):
        streamer.load(Net(), "s3://bucket/m", {"endpoint_url": store.url, **OPTIONS})
    found = by_name(exporter.get_finished_spans())
    assert set(found) == {"load", "headers"}
    for (span,) in found.values():
        assert span.status.status_code is trace.StatusCode.ERROR
        (event,) = span.events
        assert dict(event.attributes or {})["exception.type"] == "streamer.errors.AccessDeniedError"
    assert "SECRETEXAMPLE" not in "".join(span.to_json() for (span,) in found.values())


def test_nothing_where_it_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw_file({"a": entry("F32", [COUNT], 0, 4 * COUNT)}, bytes(4 * COUNT)))
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import torch, streamer\n"
        f"model = torch.nn.Module(); model.register_buffer('a', torch.ones({COUNT}))\n"
        "streamer.load(model, sys.argv[1]); assert not model.a.any()\n"
        "assert not any(name.startswith('opentelemetry.') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT, timeout=120)
