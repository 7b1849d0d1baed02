"""``s3stream doctor``: what stands between this machine and a checkpoint. Needs no torch."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.console import Console

from streamer.cli.exit_codes import exit_code
from streamer.cli.output import Output
from streamer.config import StreamConfig
from streamer.doctor import Check, Diagnosis, diagnose
from streamer.doctor.diagnose import CHECKS

__all__ = ["run_doctor"]


def run_doctor(url: str, config: StreamConfig, output: Output) -> int:
    """Print all checks; return the exit code, which is that of the first failure."""
    with output.progress("checks") as progress:
        found = asyncio.run(diagnose(url, config, progress=lambda name: progress(CHECKS.index(name), len(CHECKS))))
    output.result(_document(found), lambda console: _show(found, console))
    return exit_code(found.error) if found.error is not None else 0


def _document(found: Diagnosis) -> dict[str, Any]:
    return {
        "ok": found.ok,
        "url": found.url,
        "checks": [
            {
                "name": check.name,
                "ok": check.ok,
                "detail": check.detail,
                "remedy": check.remedy,
                "seconds": round(check.seconds, 4),
            }
            for check in found.checks
        ],
    }


def _show(found: Diagnosis, console: Console) -> None:
    if found.url:
        console.print(found.url, markup=False)
    width = max(map(len, CHECKS))
    for check in found.checks:
        console.print(f"{_mark(check):4}  {check.name:{width}}  {check.detail}", markup=False)
        if check.remedy:
            console.print(f"{'':{width + 6}}  -> {check.remedy}", markup=False)
    failed = sum(check.ok is False for check in found.checks)
    warned = sum(check.ok is True and check.remedy is not None for check in found.checks)
    console.print(f"{failed} failed, {warned} with a warning" if failed else f"ready to load, {warned} with a warning")


def _mark(check: Check) -> str:
    if check.ok is None:
        return "-"
    if not check.ok:
        return "FAIL"
    return "ok" if check.remedy is None else "warn"
