"""What others get to know of a load: a file of metrics, a file with its report, and spans. Failed loads included."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from streamer.config import StreamConfig
from streamer.errors import ConfigError
from streamer.metrics import Failure, LoadOutcome, exposition
from streamer.report import LoadReport
from streamer.spans import span
from streamer.transport.stats import TransferStats

__all__ = ["Recording", "model_name", "recording", "write_whole"]

logger = logging.getLogger("streamer")

_PLACEHOLDERS = ("model", "rank", "pid")


class Recording:
    """Takes down what a load is doing, for the case that it fails, and its report in the end.

    Attributes:
        report: set by the load as soon as there is one.
    """

    def __init__(self, url: str, rank: int) -> None:
        self.report: LoadReport | None = None
        self._url = url
        self._rank = rank
        self._phase = "open"
        self._sources: list[tuple[TransferStats, TransferStats]] = []
        self._began = time.monotonic()

    def reads(self, stats: TransferStats) -> None:
        """Count what is transferred from now on, as the statistics of a source tell."""
        self._sources.append((stats, dataclasses.replace(stats)))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what is being done; see `streamer.metrics.Failure`. A failure stays in the phase that it came from."""
        before, self._phase = self._phase, name
        yield
        self._phase = before

    def outcome(self, error: BaseException | None) -> LoadOutcome:
        """Sum up."""
        transfer = TransferStats()
        for now, before in self._sources:
            for name in ("requests", "bytes_received", "retries", "resumed_bytes", "throttled", "hedges"):
                grown = getattr(now, name) - getattr(before, name)
                setattr(transfer, name, getattr(transfer, name) + grown)
        failure = None
        if error is not None:
            failure = Failure(error=type(error).__name__, message=str(error), phase=self._phase)
        return LoadOutcome(
            url=self.report.url if self.report is not None else self._url,
            rank=self._rank,
            ended_at=time.time(),
            seconds=time.monotonic() - self._began,
            report=self.report,
            failure=failure,
            transfer=transfer,
        )


@contextlib.contextmanager
def recording(
    config: StreamConfig, url: str, rank: int, publish: Callable[[LoadOutcome], None] | None = None
) -> Iterator[Recording]:
    """Surround a load: a span, and afterwards the files that ``metrics_file`` and ``report_file`` name.

    A load that fails is recorded too, and its error goes on, whatever becomes of the files.

    Args:
        url: of the checkpoint, without secrets.
        publish: told of the outcome as well.

    Raises:
        ConfigError: the files cannot be written. Before the load, wherever that shows before.
    """
    shown = re.sub(r"\?.*", "", re.sub(r"//[^/]*@", "//", url))
    metrics = _path_of("metrics_file", config.metrics_file, shown, rank)
    report = _path_of("report_file", config.report_file, shown, rank)

    def tell(outcome: LoadOutcome) -> None:
        if metrics is not None:
            write_whole(metrics, exposition(outcome), "metrics_file")
        if report is not None:
            write_whole(report, json.dumps(_document(outcome), indent=1), "report_file")
        if publish is not None:
            publish(outcome)

    with span("load", url=shown, rank=rank, mode=config.mode) as note:
        record = Recording(shown, rank)
        try:
            yield record
        except BaseException as error:
            try:
                tell(record.outcome(error))
            except ConfigError as other:
                logger.warning("%s", other)
            raise
        outcome = record.outcome(None)
        if outcome.report is not None:
            note(bytes=outcome.report.fetched_bytes, requests=outcome.report.requests, retries=outcome.report.retries)
    tell(outcome)


def model_name(url: str) -> str:
    """Return the last part of `url`, fit for the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", url.rstrip("/").rpartition("/")[2]) or "model"


def write_whole(path: Path, text: str, option: str) -> None:
    """Write a file such that nobody ever sees half of it.

    Raises:
        ConfigError: it cannot be written, where `option` says.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        raise _not_writable(path, option, error.strerror or str(error)) from error


def _path_of(option: str, pattern: str | None, url: str, rank: int) -> Path | None:
    """Fill the placeholders of a file's name, and see whether it can be written."""
    if pattern is None:
        return None
    unknown = [name for name in re.findall(r"\{(\w*)\}", pattern) if name not in _PLACEHOLDERS]
    if unknown:
        raise ConfigError(
            f"option {option} has the unknown placeholder {{{unknown[0]}}}",
            hint="known are " + ", ".join(f"{{{name}}}" for name in _PLACEHOLDERS),
        )
    filled = pattern.replace("{model}", model_name(url)).replace("{rank}", str(rank)).replace("{pid}", str(os.getpid()))
    path = Path(filled).expanduser()
    if rank and "{rank}" not in pattern and "{pid}" not in pattern:
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")  # ranks would replace each other's
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(path, option, error.strerror or str(error)) from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise _not_writable(path, option, "it is a folder" if path.is_dir() else "its folder is not writable")
    return path


def _not_writable(path: Path, option: str, why: str) -> ConfigError:
    return ConfigError(f"cannot write {path}: {why}", hint=f"set {option} to what can be written to, or leave it out")


def _document(outcome: LoadOutcome) -> dict[str, Any]:
    ended: dict[str, Any] = {"rank": outcome.rank, "ok": outcome.failure is None, "ended_at": outcome.ended_at}
    if outcome.failure is not None:
        ended["failure"] = dataclasses.asdict(outcome.failure)
    if outcome.report is not None:
        return {**ended, **outcome.report.to_dict()}
    transfer = {key: value for key, value in dataclasses.asdict(outcome.transfer).items() if key != "first_byte_at"}
    return {**ended, "url": outcome.url, "seconds": outcome.seconds, **transfer}
