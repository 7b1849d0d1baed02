"""What tests of ranks as threads have in common."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No descriptor and no thread survives a load, however it ends; descriptors hold the shared memory."""
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    for _ in range(50):
        gc.collect()  # errors hold the frames they came through
        after = len(os.listdir("/proc/self/fd")), threading.active_count()
        if after[0] <= before[0] and after[1] <= before[1]:  # fewer: what an earlier test left has gone meanwhile
            return
        time.sleep(0.02)
    pytest.fail(f"descriptors and threads: {before} before, {after} after")
