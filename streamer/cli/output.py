"""What commands print: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from streamer.plan.timing import StoreModel

__all__ = ["DOLLARS_PER_REQUEST", "Output", "model_document", "size_text"]

#: S3 Standard in us-east-1, per request; https://aws.amazon.com/s3/pricing (GET, November 2026).
DOLLARS_PER_REQUEST = 0.0004 / 1000

#: Between two progress lines when there is no terminal to draw on.
_LINE_SECONDS = 5.0


class Output:
    """Where a command's words go.

    Args:
        as_json: the result is one JSON document.
        quiet: no progress.
    """

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._as_json = as_json
        self._quiet = quiet
        self.stdout = Console(highlight=False, soft_wrap=True)
        self.stderr = Console(stderr=True, highlight=False, soft_wrap=True)

    def result(self, document: dict[str, Any], show: Callable[[Console], None]) -> None:
        """Print `document` as JSON, or call `show` to print it for people."""
        if self._as_json:
            self.stdout.print(json.dumps(document, indent=2), markup=False)
        else:
            show(self.stdout)

    def note(self, text: str) -> None:
        """Say what is going on."""
        if not self._quiet:
            self.stderr.print(text, markup=False)

    @contextlib.contextmanager
    def progress(self, what: str, *, of_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
        """Yield ``update(done, total)``: a bar on a terminal, a line every few seconds elsewhere.

        Args:
            of_bytes: what is counted; then rate and remaining time are shown.
        """
        if self._quiet:
            yield lambda done, total: None
        elif self.stderr.is_terminal:
            columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
            if of_bytes:
                columns += [DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
            else:
                columns += [MofNCompleteColumn(), TimeElapsedColumn()]
            with Progress(*columns, console=self.stderr, transient=True) as bars:
                task = bars.add_task(what, total=None)
                yield lambda done, total: bars.update(task, completed=done, total=total)
        else:
            lines = _Lines(what, of_bytes)

            def update(done: int, total: int) -> None:
                text = lines.line(done, total)
                if text:
                    self.stderr.print(text, markup=False)  # which flushes, too

            yield update


class _Lines:
    """Decides when there is a line to print, and what it says."""

    def __init__(self, what: str, of_bytes: bool) -> None:
        self._what = what
        self._of_bytes = of_bytes
        self._last = time.monotonic()
        self._began: tuple[float, int] | None = None
        self._is_over = False

    def line(self, done: int, total: int) -> str:
        now = time.monotonic()
        if self._began is None:
            self._began = now, done
        if self._is_over or (now - self._last < _LINE_SECONDS and done != total):
            return ""
        self._last, self._is_over = now, done == total
        if not self._of_bytes:
            return f"{self._what}: {done} of {total}"
        began, before = self._began
        rate = (done - before) / max(now - began, 1e-3)
        left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
        return f"{self._what}: {size_text(done)} of {size_text(total)}, {size_text(round(rate))}/s{left}"


def size_text(nbytes: int) -> str:
    """Write a number of bytes for people, in decimal units, as store and link speeds are given."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"


def model_document(model: StoreModel) -> dict[str, Any]:
    """Write the model of a store as it is in every command's JSON."""
    link = model.link_bytes_per_second
    return {
        "first_byte_seconds": round(model.first_byte_seconds, 6),
        "bytes_per_second_per_connection": round(model.bytes_per_second_per_connection),
        "link_bytes_per_second": None if link is None else round(link),
    }
