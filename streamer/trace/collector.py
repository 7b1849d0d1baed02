"""Puts off full garbage collections while a trace fills the heap with objects that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["fewer_full_collections"]

#: Collections of the middle generation per full one; Python's own number is 10.
_MIDDLE_PER_FULL = 1000


@contextmanager
def fewer_full_collections() -> Iterator[None]:
    """Let young garbage be collected as ever, and the whole heap a hundred times less often, until the context ends.

    Full collections come as the number of living objects grows (Python's ``Modules/gcmodule.c``). A trace keeps
    half a dozen per tensor, and an engine has a million others: at 90,000 tensors, a seventh of the time went into
    walking over them all. The setting is the process's; of loads that overlap, the first sets it back.
    """
    before = gc.get_threshold()
    raised = (before[0], before[1], max(before[2], _MIDDLE_PER_FULL))
    gc.set_threshold(*raised)
    try:
        yield
    finally:
        if gc.get_threshold() == raised:
            gc.set_threshold(*before)
