"""The memory of several processes together, sampled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Node"]

_SAMPLE_SECONDS = 0.01


class Node:
    """Samples the memory of some processes together, while it is entered."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._before = self._peak = self._now()
        self._samples = 0

    def __enter__(self) -> Node:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def finish(self) -> dict[str, int]:
        """End and return the highest sample, less that at the beginning."""
        self._ending.set()
        self._thread.join()
        return {"peak_node_bytes": self._peak - self._before, "samples": self._samples}

    def _sample(self) -> None:
        while not self._ending.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, self._now())
            self._samples += 1

    def _now(self) -> int:
        return sum(map(_proportional_bytes, self._pids))


def _proportional_bytes(pid: int) -> int:
    """A process's Pss: each page divided by how many processes map it (man 5 proc_pid_smaps).

    Pages of files are left out: how many other programs use the same libraries changes all the time.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = dict(line.split()[:2] for line in lines[1:])
    return (int(found["Pss_Anon:"]) + int(found["Pss_Shmem:"])) << 10  # Linux 5.9 and later
