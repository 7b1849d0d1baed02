"""A worker extension whose commits fail when asked to, for tests of what happens then."""

from __future__ import annotations

from typing import Any

from vllm_s3stream.update import Updates
from vllm_s3stream.update.layout import Layer

__all__ = ["Sabotaged", "fail_processing"]


class Sabotaged(Updates):
    """`Updates` with a method to make them fail."""

    def sabotage(self, rank: str, after: str, times: str) -> None:
        """Let the next `times` commits on `rank` fail; see `fail_processing`."""
        if int(getattr(self, "rank")) == int(rank):  # noqa: B009  the worker's
            fail_processing(int(after), int(times))


def fail_processing(after: int, times: int) -> None:
    """Let the next `times` commits of this process fail.

    Args:
        after: so many layers in the first of them; the others, which are to undo it, fail at once.
    """
    from vllm_s3stream.update import commit

    process = commit._process
    left, seen = times, 0

    def sabotaged(layer: Layer, method: Any) -> None:
        nonlocal left, seen
        seen += 1
        if left and seen > after:
            left -= 1
            raise RuntimeError("sabotaged")
        process(layer, method)

    commit._process = sabotaged
