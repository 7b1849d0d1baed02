"""Whether a machine has memory for a second copy of the weights, before any of it is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from streamer.config import StreamConfig
from streamer.errors import LoadError
from streamer.share.group import Group

__all__ = ["available_bytes", "require_host_memory"]


def require_host_memory(group: Group | None, config: StreamConfig, nbytes: int, *, purpose: str) -> None:
    """See that all ranks of this machine together find as much memory as they say. A collective.

    Args:
        nbytes: that this rank is going to take.

    Raises:
        LoadError: they do not; on all ranks of the machine.
    """
    needed = nbytes
    if group is not None and group.size > 1:
        answers = group.gather((group.host, nbytes), timeout_seconds=config.share_timeout_seconds)
        needed = sum(wanted for host, wanted in answers if host == group.host)
    available = available_bytes()
    if available is not None and needed > available:
        raise LoadError(
            f"{purpose} takes {needed} bytes of host memory on this machine, and {available} are available",
            hint="give the machine, or the container, more memory; nothing was changed",
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory this process can take without pushing others out; None if nobody says.

    The least of what the kernel calls available and what the limits of the control groups leave, in which pages of
    files that are not in use do not count.
    """
    found = [*_of_the_machine(root), *_of_control_groups(root)]
    return max(0, min(found)) if found else None


def _of_the_machine(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10


def _of_control_groups(root: Path) -> Iterator[int]:
    """Yield what each limit above this process leaves, in versions 2 and 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, cached = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used, cached = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = base / path.strip("/")
        # In a container, the path may be the host's, and the mount begins at the container's own group.
        for at in (folder, *folder.parents):
            if at == base.parent:
                break
            most, now = _read(at / limit).strip(), _read(at / used).strip()
            if most.isdigit() and now.isdigit():
                statistics = dict(
                    entry.split(" ", 1) for entry in _read(at / "memory.stat").splitlines() if " " in entry
                )
                yield int(most) - int(now) + int(statistics.get(cached, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
