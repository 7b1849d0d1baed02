"""The direction of imports, shown by running: pure parts in a bare interpreter, light entry points."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = ["streamer.errors", "streamer.config"] + [
    f"streamer.{package}.{path.stem}"
    for package in ("checkpoint", "plan")
    for path in sorted((ROOT / "streamer" / package).glob("*.py"))
    if path.stem != "__init__"
]
PURE += ["streamer.transport.head", "streamer.transport.checks", "streamer.transport.scatter", "streamer.report"]
PURE += ["streamer.metrics", "streamer.spans", "streamer.recording"]
#: Lower layers never import higher ones. A package may import those before it.
LAYERS = [
    "errors",
    "option_values",
    "config",
    "cache",
    "report",
    "spans",
    "checkpoint",
    "plan",
    "transport",
    "metrics",
    "recording",
    "rank_reports",
    "progress_bar",
    "sources",
    "fsspec_protocol",
    "fetch",
    "doctor",
    "share",
    "trace",
    "plan_cache",
    "verify",
    "missing",
    "books",
    "session",
    "loader",
    "artifacts",
    "update",
    "engines",
    "dryrun",
    "reference",
    "cli",
]


def loaded_by(*modules: str, arguments: tuple[str, ...] = ("-I", "-S")) -> set[str]:
    """Import `modules` in a fresh interpreter and return the top-level names in ``sys.modules``."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        + "".join(f"import {module}\n" for module in modules)
        + "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, *arguments, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_need_only_the_standard_library(module: str) -> None:
    """Without site-packages (-S): an import of torch, botocore or any SDK would fail."""
    assert not loaded_by(module) & {"asyncio", "torch", "botocore", "aiobotocore", "numpy", "socket", "ssl"}


def test_package_itself_is_light() -> None:
    assert not loaded_by("streamer") & {"torch", "asyncio", "botocore"}


def test_inspect_fetch_verify_bench_and_doctor_need_no_torch() -> None:
    modules = (
        "streamer.cli.inspect",
        "streamer.cli.fetch",
        "streamer.cli.verify",
        "streamer.cli.bench",
        "streamer.cli.doctor",
        "streamer.sources.s3",
        "streamer.cli.app",
    )
    needed = loaded_by(*modules, arguments=("-I",))
    assert "aiobotocore" in needed
    assert "torch" not in needed


def test_imports_point_one_way() -> None:
    rank = {name: number for number, name in enumerate(LAYERS)}
    wrong = []
    for path in sorted((ROOT / "streamer").rglob("*.py")):
        own = path.relative_to(ROOT / "streamer").with_suffix("").parts[0]
        if own == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module]
            for target in targets:
                parts = target.split(".")
                if parts[0] == "streamer" and len(parts) > 1 and rank[parts[1]] > rank[own]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {target}")
    assert not wrong


def test_the_library_knows_no_plugin() -> None:
    wrong = [path.name for path in (ROOT / "streamer").rglob("*.py") if "_s3stream" in path.read_text()]
    assert not wrong


@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_plugins_import_their_host_in_functions(host: str) -> None:
    """All but the loader itself, which is a subclass of the host's and is imported when it is registered."""
    for path in sorted((ROOT / "plugins" / f"{host}_s3stream").rglob("*.py")):
        if path.name == "loader.py":
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.partition(".")[0] == host for name in names), path


def test_modules_are_small() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for package in ("streamer", "plugins")
        for path in (ROOT / package).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 350
    }
    assert not long
