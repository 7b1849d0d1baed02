"""Spans of OpenTelemetry, where its API is installed; nothing elsewhere.

They go to whatever ``TracerProvider`` the process has configured; we configure none.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Note", "add_span", "span"]

#: Adds attributes, under ``s3stream.``, to a span that is open.
Note = Callable[..., None]


@contextlib.contextmanager
def span(name: str, **attributes: str | int | float) -> Iterator[Note]:
    """Time a part of a load as ``s3stream.NAME``, below the current span; an exception marks it as failed.

    Args:
        attributes: put under ``s3stream.``; never a secret.
    """
    tracer = _tracer()
    if tracer is None:
        yield _ignore
        return
    with tracer.start_as_current_span(f"s3stream.{name}", attributes=_named(attributes)) as opened:

        def note(**more: str | int | float) -> None:
            opened.set_attributes(_named(more))

        yield note


def add_span(name: str, began_ns: int, ended_ns: int, **attributes: str | int | float) -> None:
    """Add a span that is over; times are nanoseconds since 1970."""
    tracer = _tracer()
    if tracer is not None:
        added = tracer.start_span(f"s3stream.{name}", attributes=_named(attributes), start_time=began_ns)
        added.end(ended_ns)


def _tracer() -> Any:
    try:
        trace = importlib.import_module("opentelemetry.trace")
    except ImportError:
        return None
    return trace.get_tracer("s3stream")


def _named(attributes: dict[str, str | int | float]) -> dict[str, str | int | float]:
    return {f"s3stream.{name}": value for name, value in attributes.items()}


def _ignore(**_: str | int | float) -> None:
    pass
