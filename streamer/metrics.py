"""A load in numbers, in Prometheus' text format; https://prometheus.io/docs/instrumenting/exposition_formats.

All are gauges about the last load of a rank: a file that the next load replaces cannot be a counter's home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from streamer.report import LoadReport
from streamer.transport.stats import TransferStats

__all__ = ["METRICS", "Failure", "LoadOutcome", "Metric", "exposition"]

#: Labels and value.
Sample = tuple[dict[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a load ended that did not succeed.

    Attributes:
        error: name of the exception's class.
        message: for people; never holds a secret.
        phase: ``open``, ``headers``, ``weights`` (tracing, planning, fetching, copying,
            and comparing what arrived) or ``check`` (of what the model says it loaded).
    """

    error: str
    message: str
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """One load on one rank, however it ended.

    Attributes:
        url: the checkpoint; never holds a secret.
        ended_at: seconds since 1970.
        seconds: from beginning to end.
        report: there whenever the load came far enough for one.
        failure: None for a load that succeeded.
        transfer: what was transferred, for loads without a report.
    """

    url: str
    rank: int
    ended_at: float
    seconds: float
    report: LoadReport | None = None
    failure: Failure | None = None
    transfer: TransferStats = field(default_factory=TransferStats)


@dataclass(frozen=True, slots=True)
class Metric:
    """One name, what it says, and how to get its samples from an outcome.

    Attributes:
        labels: names of the labels besides ``url`` and ``rank``, which all have.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[LoadOutcome], Iterable[Sample]]

    def samples(self, outcome: LoadOutcome) -> Iterator[Sample]:
        """Yield labels and values, ``url`` and ``rank`` included."""
        for labels, value in self.read(outcome):
            yield {"url": outcome.url, "rank": str(outcome.rank), **labels}, value


def _plain(read: Callable[[LoadOutcome], float]) -> Callable[[LoadOutcome], Iterable[Sample]]:
    return lambda outcome: [({}, read(outcome))]


def _failed(outcome: LoadOutcome) -> Iterable[Sample]:
    failure = outcome.failure
    return [] if failure is None else [({"error": failure.error, "phase": failure.phase}, 1.0)]


def _phases(outcome: LoadOutcome) -> Iterator[Sample]:
    if outcome.report is not None:
        times = outcome.report.times
        for phase in ("headers", "trace", "plan", "fetch", "copy"):
            yield {"phase": phase}, getattr(times, phase)


def _first_byte(outcome: LoadOutcome) -> Iterator[Sample]:
    if outcome.report is not None and outcome.report.times.first_byte is not None:
        yield {}, outcome.report.times.first_byte


def _bytes(outcome: LoadOutcome) -> Iterator[Sample]:
    report = outcome.report
    if report is None:
        yield {"kind": "fetched"}, outcome.transfer.bytes_received
        yield {"kind": "resumed"}, outcome.transfer.resumed_bytes
        return
    for kind in ("checkpoint", "needed", "fetched", "over_read", "header", "resumed"):
        yield {"kind": kind}, getattr(report, f"{kind}_bytes")
    if report.sharing is not None and report.sharing.node_fetched_bytes is not None:
        yield {"kind": "node_fetched"}, report.sharing.node_fetched_bytes


def _count(name: str) -> Callable[[LoadOutcome], Iterable[Sample]]:
    return _plain(lambda outcome: getattr(outcome.report or outcome.transfer, name))


def _buffers(outcome: LoadOutcome) -> Iterable[Sample]:
    return [] if outcome.report is None else [({}, outcome.report.peak_buffer_bytes)]


METRICS = (
    Metric("s3stream_load_success", "1 if the last load succeeded, else 0.", (), _plain(lambda o: o.failure is None)),
    Metric("s3stream_load_failure", "1 for what the last load failed of, and when.", ("error", "phase"), _failed),
    Metric("s3stream_load_end_timestamp_seconds", "When the last load ended.", (), _plain(lambda o: o.ended_at)),
    Metric("s3stream_load_duration_seconds", "How long the last load took.", (), _plain(lambda o: o.seconds)),
    Metric("s3stream_load_phase_seconds", "Time the last load spent in each part.", ("phase",), _phases),
    Metric("s3stream_load_first_byte_seconds", "Until the first bytes of weights were there.", (), _first_byte),
    Metric("s3stream_load_bytes", "Bytes of the last load, by kind; see LoadReport.", ("kind",), _bytes),
    Metric("s3stream_load_requests", "Ranged reads sent, retries included.", (), _count("requests")),
    Metric("s3stream_load_retries", "Tries after a failure.", (), _count("retries")),
    Metric("s3stream_load_hedges", "Reads asked for a second time because they took long.", (), _count("hedges")),
    Metric("s3stream_load_throttles", "Answers that asked for fewer requests.", (), _count("throttled")),
    Metric("s3stream_load_peak_buffer_bytes", "Most staging memory at once.", (), _buffers),
)


def exposition(outcome: LoadOutcome) -> str:
    """Write `outcome` as a text file for Prometheus, such as the textfile collector of node_exporter takes."""
    lines = []
    for metric in METRICS:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} gauge"]
        for labels, value in metric.samples(outcome):
            pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{{{pairs}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
