"""The index of pending copies finds what a look at all of them finds."""

from __future__ import annotations

import random
from typing import Any

import torch

from streamer.plan.geometry import View
from streamer.trace.pending import PendingCopies


def window_of(first: int, end: int) -> View:
    return View(first, 1, (end - first,), (1,))


def test_overlaps_are_found_to_the_byte() -> None:
    """As copies come in any order, and go."""
    nothing: Any = None
    chosen = random.Random(5)
    for _ in range(200):
        pending = PendingCopies()
        taken: set[tuple[int, int, int]] = set()
        for serial in range(60):
            key, first = chosen.randrange(2), chosen.randrange(40)
            end = first + chosen.randrange(5)
            window = window_of(first, end)
            found = pending.overlapping(window, end, key)
            assert {(each.key, each.window.offset, each.end) for each in found} == {
                (other, start, stop)
                for other, start, stop in taken
                if other == key and max(start, first) < min(stop, end)
            }
            for each in found[: chosen.randrange(3)]:
                pending.remove(each)
                taken.remove((each.key, each.window.offset, each.end))
            if end > first and not pending.overlapping(window, end, key):
                pending.add(torch.empty(0), nothing, key, window, end, serial)
                taken.add((key, first, end))
        everything = pending.all()
        assert [each.number for each in everything] == sorted(each.number for each in everything)
        assert {(each.key, each.window.offset, each.end) for each in everything} == taken
