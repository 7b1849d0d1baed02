"""The processes of a benchmark: a server, and one per measured row."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.benchmarks.rig import GIB

ROOT = Path(__file__).parent.parent.parent
READY, MEASURED = "ready", "measured"

#: What S3 is like from a machine in its region, give or take: time to the first byte, rate of one connection.
STORES: dict[str, dict[str, float]] = {"plain": {}, "s3like": {"first_byte_seconds": 0.03, "bytes_per_second": 90e6}}


class Served:
    """Our object server in a process of its own.

    Attributes:
        endpoint: its URL.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._before: dict[str, int] = {}
        self.endpoint = self._line()

    def counted(self) -> dict[str, int]:
        """Return the ``requests``, ``connections`` and ``served_bytes`` since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, int] = json.loads(self._line())
        since = {name: value - self._before.get(name, 0) for name, value in found.items()}
        self._before = found
        return since

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError("the object server has ended")
        return line


@contextlib.contextmanager
def object_server(root: Path, *options: str, module: str = "tests.servers.object_server") -> Iterator[Served]:
    """Our object server in a process of its own, on the first processor where there are two."""
    command = [sys.executable, "-m", module, str(root), *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=pin(0, 1)
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield Served(process)
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def store_options(store: str) -> list[str]:
    """Options of the object server for ``plain``, which is as fast as it can be, or ``s3like``."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in STORES[store].items()]


def require(packages: Sequence[str], what: str) -> None:
    """Check that `packages` are installed.

    Raises:
        SystemExit: one is not.
    """
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            raise SystemExit(
                f"{what} needs {package}, which is not installed; it comes with the extra `bench`: "
                "pip install -e '.[bench]', or name the rows to run with --only"
            ) from None


def pin(first: int, last: int | None = None) -> Callable[[], None]:
    """Return what keeps a new process on the processors ``[first:last]`` of ours, if there are any."""
    available = sorted(os.sched_getaffinity(0))

    def keep() -> None:
        if len(available) > 1:
            os.sched_setaffinity(0, available[first:last])

    return keep


@dataclass
class Sample:
    """One measured run."""

    cpu_seconds: float
    wall_seconds: float
    nbytes: int
    peak_extra_bytes: int

    @property
    def cpu_per_gib(self) -> float:
        return self.cpu_seconds / (self.nbytes / GIB)


def reset_peak_memory() -> None:
    """Make VmHWM start anew at the present size (man 5 proc_pid_clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> int:
    """Bytes of ``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure(work: Callable[[], int], *, meet: Callable[[], object] = lambda: None) -> Sample:
    """Run `work`, which returns the bytes it moved, in this process; destinations are touched beforehand.

    Whoever started this row is told before and after, and waits meanwhile: see `Row`. Processor time is that of this
    process and of children that have ended. The warm-up's garbage is collected first: otherwise a full collection of
    torch's heap, 0.2 s, falls into every second measurement by chance.

    Args:
        meet: waits for the other ranks, just before the clock starts and after it stops.
    """
    gc.collect()
    _tell(READY)
    meet()
    before = memory("VmRSS")
    reset_peak_memory()
    usage, clock = _processor_seconds(), time.perf_counter()
    nbytes = work()
    wall, cpu = time.perf_counter() - clock, _processor_seconds() - usage
    peak = memory("VmHWM") - before
    meet()
    _tell(MEASURED)
    return Sample(cpu, wall, nbytes, peak)


def _tell(what: str) -> None:
    print(what, flush=True)
    sys.stdin.readline()


def _processor_seconds() -> float:
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Row:
    """One row of a benchmark, in a process of its own, which says when it is ready and when it has measured."""

    def __init__(
        self,
        module: str,
        row: str,
        arguments: Mapping[str, Any],
        *,
        environ: Mapping[str, str] | None = None,
        preexec: Callable[[], None] | None = None,
    ) -> None:
        given = {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
        }
        self._row = row
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--row", row, "--arguments", json.dumps(dict(arguments))],
            cwd=ROOT,
            env={**os.environ, **given, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            preexec_fn=preexec or pin(-1),
        )

    def __enter__(self) -> Row:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            assert pipe is not None
            pipe.close()

    def wait_until(self, what: str) -> None:
        """Wait until the row says that it is `READY`, or has `MEASURED`; it then waits for `go_on`.

        Raises:
            RuntimeError: it has ended.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == what:
                return
        raise self.failure()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Return what the row printed last, when it has ended.

        Raises:
            RuntimeError: it failed.
        """
        assert self.process.stdout is not None
        lines = self.process.stdout.read().splitlines()
        if self.process.wait() or not lines:
            raise self.failure()
        document: dict[str, Any] = json.loads(lines[-1])
        return document

    def failure(self) -> RuntimeError:
        """Return what to raise when it has ended and should not have."""
        code = self.process.wait()
        self._errors.seek(0)
        return RuntimeError(f"row {self._row} failed with exit status {code}:\n{self._errors.read()[-3000:]}")


def run_row(
    module: str,
    row: str,
    arguments: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    server: Served | None = None,
) -> dict[str, Any]:
    """Run one row of a benchmark in a process of its own, on the last processor; return its JSON.

    Args:
        server: whose counts for the measured part are added.
    """
    with Row(module, row, arguments, environ=environ) as process:
        process.wait_until(READY)
        if server:
            server.counted()
        process.go_on()
        process.wait_until(MEASURED)
        counted = server.counted() if server else {}
        process.go_on()
        return {**process.result(), **counted}


def emit(sample: Sample, **more: Any) -> None:
    print(json.dumps({**asdict(sample), "cpu_per_gib": sample.cpu_per_gib, **more}))
