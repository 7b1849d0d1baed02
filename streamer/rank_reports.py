"""What others get to know of each rank's loads: ``S3STREAM_REPORT_DIR``, and the engine's own metrics."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch

from streamer.metrics import METRICS, LoadOutcome
from streamer.recording import model_name, write_whole
from streamer.report import LoadReport

logger = logging.getLogger("streamer")

__all__ = ["publish_metrics", "rank_of_process", "write_report"]


def rank_of_process() -> int:
    """Return this process's rank among those of the engine."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def write_report(report: LoadReport, folder: str | None) -> Path | None:
    """Write `report` as JSON; the name says which model, rank and process. Nothing without a folder.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    if folder is None:
        return None
    rank = rank_of_process()
    path = Path(folder, f"{model_name(report.url)}.rank{rank}.{os.getpid()}.json")
    write_whole(path, json.dumps({"rank": rank, **report.to_dict()}, indent=1), "report_dir")
    return path


def publish_metrics(outcome: LoadOutcome) -> None:
    """Put the metrics of a load where the engine's ``/metrics`` finds them, if it looks into other processes at all.

    Weights are loaded in worker processes, and engines serve metrics from the one of their API. The way between them is
    the folder of prometheus_client's multiprocess mode, PROMETHEUS_MULTIPROC_DIR. vLLM makes it if it runs several API
    servers, SGLang with ``--enable-metrics``, and both use one that is set before they start. Without it this does
    nothing. In that mode a gauge has a file in
    the folder and needs no registry; ``mostrecent`` keeps the process out of its labels.
    """
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return
    try:
        from prometheus_client import Gauge
    except ImportError:
        return
    try:
        for metric in METRICS:
            names = ("url", "rank", *metric.labels)
            gauge = Gauge(metric.name, metric.help, names, registry=None, multiprocess_mode="mostrecent")
            for labels, value in metric.samples(outcome):
                gauge.labels(**labels).set(value)
    except OSError as error:
        logger.warning("metrics cannot be put into PROMETHEUS_MULTIPROC_DIR: %s", error.strerror)
