"""What the validators are given: tools, wheels, rendered manifests. `.ci/deploy` provides them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.terraform import Terraform


def program(name: str) -> str:
    """Return the path of a program, from this environment first; skip, saying so, where there is none."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed, so nothing that needs it was checked")
    return found


@pytest.fixture(scope="session")
def wheels() -> Path:
    """The folder with the wheels of ``bindings.txt``."""
    folder = os.environ.get("DEPLOY_WHEELS")
    if not folder:
        pytest.fail("DEPLOY_WHEELS must name the folder with the wheels of tests/deploy/bindings.txt; see .ci/deploy")
    return Path(folder)


@pytest.fixture(scope="session")
def kubectl() -> str:
    return program("kubectl")


@pytest.fixture(scope="session")
def terraform(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terraform]:
    with Terraform.start(program("terraform"), wheels, tmp_path_factory.mktemp("terraform")) as started:
        yield started
