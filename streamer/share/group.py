"""The ranks that load together, reached through the engine's own process group."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from streamer.errors import LoadError

__all__ = ["Group", "ProcessGroup", "host_identity"]

T = TypeVar("T")


class Group(Protocol):
    """What is asked of a process group. Every method is a collective: all ranks call it, in the same order."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def host(self) -> str:
        """Identity of the machine that this rank is on; equal for ranks that can share memory."""

    def gather(self, value: T, *, timeout_seconds: float) -> list[T]:
        """Return every rank's `value`, by rank.

        Raises:
            LoadError: a rank did not come in time, or is gone.
        """

    def broadcast(self, value: T | None, *, source: int) -> T:
        """Return rank `source`'s `value`, for which all have come already.

        Raises:
            LoadError: a rank is gone.
        """


def host_identity() -> str:
    """Tell machines apart, and containers that cannot see each other's processes.

    Names do not: every pod may call itself the same, and two may share a machine.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"no /proc, process {os.getpid()} of {os.uname().nodename}"


class ProcessGroup:
    """A group of ``torch.distributed``, on CPU (gloo).

    Args:
        group: which; all its ranks take part.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.host = host_identity()

    def __repr__(self) -> str:
        return f"<ProcessGroup rank {self.rank} of {self.size}>"

    def gather(self, value: T, *, timeout_seconds: float) -> list[T]:
        answers: list[Any] = [None] * self.size
        try:
            # The collective itself would wait as long as the group was made to, often half an hour, and name nobody.
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=timeout_seconds), wait_all_ranks=True)
            dist.all_gather_object(answers, value, group=self._group)
        except RuntimeError as error:
            raise _absent(error, timeout_seconds) from error
        return answers

    def broadcast(self, value: T | None, *, source: int) -> T:
        box: list[Any] = [value]
        try:
            dist.broadcast_object_list(box, src=dist.get_global_rank(self._group, source), group=self._group)
        except RuntimeError as error:
            raise _absent(error, 0) from error
        received: T = box[0]
        return received


def _absent(error: RuntimeError, timeout_seconds: float) -> LoadError:
    text = str(error)
    named = re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", text)
    if named:
        what = f"rank {named[1].strip(' ,')} did not come within {timeout_seconds:g} s, or ended"
    elif "monitoredBarrier" in text:
        what = "rank 0, or one that it waited for, did not come or ended"
    else:
        what = f"another rank ended or failed to answer: {text.splitlines()[0][:200]}"
    return LoadError(
        f"the ranks that load together wait for each other: {what}",
        hint="look for its first error in the logs, and at share_timeout_seconds if it was only slow",
    )
