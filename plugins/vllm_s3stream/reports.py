"""Writes each rank's `LoadReport` where ``S3STREAM_REPORT_DIR`` points."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch

from streamer.errors import ConfigError
from streamer.report import LoadReport

__all__ = ["write_report"]


def write_report(report: LoadReport, folder: str | None) -> Path | None:
    """Write `report` as JSON; the name says which model, rank and process. Nothing without a folder.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    if folder is None:
        return None
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", report.url.rstrip("/").rpartition("/")[2]) or "model"
    path = Path(folder, f"{name}.rank{rank}.{os.getpid()}.json")
    unfinished = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({"rank": rank, **report.to_dict()}, indent=1))
        unfinished.rename(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write the report {path}: {error.strerror}",
            hint="set report_dir to a folder that can be written to",
        ) from error
    return path
