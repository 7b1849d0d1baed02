"""Runs Terraform offline, on a copy of ``terraform/``, with providers that are schemas only."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.bindings import read_schema

__all__ = ["MODULES", "ROOT", "Terraform", "types_used"]

ROOT = Path(__file__).parent.parent.parent
#: What ``validate`` is run in, relative to ``terraform/``: modules, and the examples that use them.
MODULES = tuple(
    sorted(str(path.parent.relative_to(ROOT / "terraform")) for path in ROOT.glob("terraform/**/versions.tf"))
)

_BINDINGS = {"aws": "cdktn_provider_aws-*.whl", "google": "cdktn_provider_google-*.whl"}
_USED = re.compile(r'^\s*(resource|data|mock_resource|mock_data)\s+"((?:aws|google)_[a-z0-9_]+)"', re.MULTILINE)


def types_used(folder: Path) -> set[str]:
    """Return the types of resources and, with ``data.`` before them, of data sources in all files below `folder`."""
    found = set()
    for path in (*folder.rglob("*.tf"), *folder.rglob("*.tftest.hcl")):
        for keyword, name in _USED.findall(path.read_text()):
            found.add(f"data.{name}" if keyword in {"data", "mock_data"} else name)
    return found


@dataclass(frozen=True, slots=True)
class Terraform:
    """Terraform, with providers that `start` started.

    Attributes:
        providers: where they listen, as Terraform wants to be told.
        tree: a copy of ``terraform/``, so that nothing is written into the working tree.
    """

    binary: str
    providers: str
    tree: Path

    @classmethod
    @contextmanager
    def start(cls, binary: str, wheels: Path, folder: Path) -> Iterator[Terraform]:
        """Copy the modules, and run providers of the bindings in `wheels`, for what the modules use; all in `folder`.

        Raises:
            ValueError: the modules use something that the bindings do not have, or not as it is understood.
            FileNotFoundError: there are no bindings.
        """
        tree = folder / "terraform"
        shutil.copytree(ROOT / "terraform", tree, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
        used = types_used(tree)
        running = {}
        with ExitStack() as stack:
            for provider, pattern in _BINDINGS.items():
                wheel = next(wheels.glob(pattern), None)
                if wheel is None:
                    raise FileNotFoundError(f"there is no {pattern} in {wheels}")
                types = {name for name in used if name.removeprefix("data.").startswith(f"{provider}_")}
                schema = folder / f"{provider}.json"
                schema.write_text(json.dumps(read_schema(wheel, types)))
                running[f"registry.terraform.io/hashicorp/{provider}"] = stack.enter_context(_provider(schema))
            yield cls(binary, json.dumps(running), tree)

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one command in `module`, whose modules are installed first; both streams come back as stdout."""
        folder = self.tree / module
        if "validate" in arguments or "test" in arguments:
            self._call(folder, "get").check_returncode()
        return self._call(folder, *arguments)

    def _call(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("TF_", "AWS_", "GOOGLE_"))
        }
        environment |= {
            "CHECKPOINT_DISABLE": "1",
            "TF_CLI_CONFIG_FILE": os.devnull,
            "TF_IN_AUTOMATION": "1",
            "TF_REATTACH_PROVIDERS": self.providers,
        }
        return subprocess.run(
            [self.binary, *arguments, "-no-color"] if arguments[0] != "fmt" else [self.binary, *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )


@contextmanager
def _provider(schema: Path) -> Iterator[dict[str, Any]]:
    """Run a provider; yields what Terraform must know to find it."""
    with tempfile.TemporaryDirectory() as folder:  # whose name is short enough for a socket's
        command = [sys.executable, "-m", "tests.deploy.schema_provider", str(schema), folder]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, f"the provider of {schema.name} did not start"
            yield {
                "Protocol": "grpc",
                "ProtocolVersion": 6,
                "Pid": process.pid,
                "Test": True,
                "Addr": {"Network": "unix", "String": address},
            }
        finally:
            process.terminate()
            process.wait(timeout=30)
            process.stdout.close()
