"""Runs the suite, or parts of it: ``python -m tests.benchmarks [PART ...] [--quick] [--vllm PYTHON]``.

Each part is a program of its own (``python -m tests.benchmarks.sharing --help``), and writes its raw results as JSON.
When all have run, plots are drawn beside the results, and what the README says of them is printed;
``python -m tests.benchmarks.tables --write README.md`` puts it there. A part that fails does not keep the others from
running, and the exit status is 1 then.

The interpreter needs the extra ``bench``. The parts ``trace_cost``, ``plan_cache`` and ``engine`` need another, which
has vLLM and Run:ai's packages (see CONTRIBUTING.md); ``--vllm`` names it. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.processes import ROOT
from tests.benchmarks.rig import RESULTS

__all__ = ["PARTS", "Part", "commands"]


@dataclass(frozen=True)
class Part:
    """A program of the suite.

    Attributes:
        module: of this package.
        full, quick: its options, for results and to see that it runs.
        needs_vllm: it runs in the environment with vLLM.
    """

    module: str
    full: str = ""
    quick: str = ""
    needs_vllm: bool = False


#: All of the full runs together take about 33 minutes on 2 cores; more rounds are an option of each part.
_ONE = "--rounds 1 --layers 1"
PARTS = {
    "end_to_end": Part("end_to_end", "--rounds 3 --layers 14", _ONE),
    "peers": Part("peers", "--rounds 3 --layers 4", f"{_ONE} --only Run:ai boto3"),
    "peers_tls": Part("peers", "--tls --rounds 3 --layers 4", f"{_ONE} --tls --only boto3"),
    "sharing": Part(
        "sharing",
        "--rounds 2 --layers 2 --stores s3like --runai-sizes 1 2 4 8 "
        "--only share=off Run:ai 'Run:ai, limited' 'Run:ai, distributed'",
        f"{_ONE} --stores s3like --sizes 2 --only share=off",
    ),
    "memory": Part("memory", "", "--largest-mib 32 --only 'in place' '2 ranks that share'"),
    "scale": Part("scale", "--rounds 2", "--rounds 1 --tensors 1000 4000 --mib 16 64"),
    "throughput": Part("throughput", "", f"{_ONE} --tensors 2000"),
    "predict": Part("predict", "--rounds 2", "--quick --rounds 1"),
    "faults": Part("faults", "--rounds 3", _ONE),
    "header_read": Part("header_read"),
    "trace_cost": Part("trace_cost", "--rounds 2", "--rounds 1 --layers 4", needs_vllm=True),
    "plan_cache": Part("plan_cache", "--rounds 3", "--rounds 1 --layers 4", needs_vllm=True),
    "engine": Part("engine", "--rounds 3", f"{_ONE} --only 'default, from disk'", needs_vllm=True),
}


def commands(names: Sequence[str], vllm: str | None, folder: Path, *, is_quick: bool) -> dict[str, list[str]]:
    """Return what to run, by part; all parts when `names` is empty.

    Raises:
        SystemExit: a part needs vLLM, and no interpreter was named for it.
    """
    chosen = {name: part for name, part in PARTS.items() if not names or name in names}
    for name, part in chosen.items():
        if part.needs_vllm and vllm is None:
            raise SystemExit(
                f"{name} needs an interpreter with vLLM: name it with --vllm, or name the parts to run without: "
                + " ".join(other for other in PARTS if not PARTS[other].needs_vllm)
            )
    return {
        name: [
            (vllm if part.needs_vllm else None) or sys.executable,
            *("-m", f"tests.benchmarks.{part.module}", *shlex.split(part.quick if is_quick else part.full)),
            *("--results", str(folder)),
        ]
        for name, part in chosen.items()
    }


def run(wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """Run one after the other; return the names of those that failed."""
    failed = []
    for name, command in wanted.items():
        print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT)
        if done.returncode:
            failed.append(name)
        print(f"== {name}: exit status {done.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="see that everything runs; the figures mean nothing")
    parser.add_argument("--predict-error", action="store_true", help="the part predict: predicted and measured seconds")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter for the parts that need vLLM")
    parser.add_argument(
        "--results", type=Path, help="folder for results; by default that of this package, except of --quick"
    )
    options = parser.parse_args()
    names = [*options.parts, *(["predict"] if options.predict_error else [])]
    with contextlib.ExitStack() as stack:
        folder = options.results or RESULTS
        if options.quick and options.results is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="s3stream-bench-")))
        began = time.monotonic()
        failed = run(commands(names, options.vllm, folder.resolve(), is_quick=options.quick))
        for module in ("plots", "tables"):
            command = [sys.executable, "-m", f"tests.benchmarks.{module}", "--results", str(folder.resolve())]
            print(f"\n== {module}", flush=True)
            if subprocess.run(command, cwd=ROOT).returncode:
                failed.append(module)
    print(f"\n{time.monotonic() - began:.0f} s in all; failed: {', '.join(failed) or 'nothing'}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
