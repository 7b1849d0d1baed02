"""Runs Terraform offline, on a copy of ``terraform/``, with providers that are schemas only."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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
    """Terraform, configured for providers that `prepare` made.

    Attributes:
        tree: a copy of ``terraform/``, so that nothing is written into the working tree.
    """

    binary: str
    configuration: Path
    tree: Path

    @classmethod
    def prepare(cls, binary: str, wheels: Path, folder: Path) -> Terraform:
        """Make providers of the bindings in `wheels`, for what the modules use, and copy the modules; all in `folder`.

        Raises:
            ValueError: the modules use something that the bindings do not have, or not as it is understood.
            FileNotFoundError: there are no bindings.
        """
        tree = folder / "terraform"
        shutil.copytree(ROOT / "terraform", tree, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
        used = types_used(tree)
        overrides = []
        for provider, pattern in _BINDINGS.items():
            wheel = next(wheels.glob(pattern), None)
            if wheel is None:
                raise FileNotFoundError(f"there is no {pattern} in {wheels}")
            own = folder / provider
            own.mkdir()
            schema = own / "schema.json"
            types = {name for name in used if name.removeprefix("data.").startswith(f"{provider}_")}
            schema.write_text(json.dumps(read_schema(wheel, types)))
            program = own / f"terraform-provider-{provider}"
            program.write_text(
                f"#!/bin/sh\nPYTHONPATH='{ROOT}' exec '{sys.executable}' -m tests.deploy.schema_provider '{schema}'\n"
            )
            program.chmod(0o755)
            overrides.append(f'    "hashicorp/{provider}" = "{own}"\n')
        configuration = folder / "terraform.rc"
        configuration.write_text(
            "disable_checkpoint = true\nprovider_installation {\n  dev_overrides {\n" + "".join(overrides) + "  }\n}\n"
        )
        return cls(binary, configuration, tree)

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
        environment |= {"TF_CLI_CONFIG_FILE": str(self.configuration), "TF_IN_AUTOMATION": "1"}
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
