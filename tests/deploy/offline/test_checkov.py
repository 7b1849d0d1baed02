"""checkov, which has an environment of its own, over everything; checkov.yaml has a reason for each skip."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.offline.conftest import program
from tests.deploy.offline.rendering import OVERLAYS, render
from tests.deploy.terraform import ROOT

#: Fewer would mean that files were not found or not understood, which checkov passes in silence.
LEAST_CHECKS = {"terraform": 40, "kubernetes": 400, "dockerfile": 100}


def checkov(framework: str, folder: Path) -> tuple[int, list[str]]:
    """Return how many checks passed, and which failed where."""
    binary = os.environ.get("DEPLOY_CHECKOV")
    if not binary:
        pytest.fail("DEPLOY_CHECKOV must name checkov's program; see .ci/deploy")
    configuration = Path(__file__).parent / "checkov.yaml"
    command = [binary, "--config-file", str(configuration), "-d", str(folder), "--framework", framework, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in {0, 1}, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    if "results" not in report:
        return int(report["passed"]), []
    failed = [f"{check['check_id']} {check['resource']}" for check in report["results"]["failed_checks"]]
    return report["summary"]["passed"], failed


def rendered(folder: Path) -> Path:
    kubectl = program("kubectl")
    for overlay in OVERLAYS:
        documents = render(kubectl, ROOT / "examples" / "kubernetes", overlay)
        (folder / f"{overlay}.yaml").write_text(yaml.safe_dump_all(documents))
    return folder


@pytest.mark.parametrize("framework", LEAST_CHECKS)
def test_checkov(framework: str, tmp_path: Path) -> None:
    folders = {"terraform": ROOT / "terraform", "dockerfile": ROOT / "examples" / "docker"}
    passed, failed = checkov(framework, folders.get(framework) or rendered(tmp_path))
    assert failed == []
    assert passed >= LEAST_CHECKS[framework]


BAD = {
    "terraform": ("main.tf", 'resource "aws_s3_bucket" "open" {\n  bucket = "open"\n}\n', "CKV2_AWS_6"),
    "kubernetes": (
        "pod.yaml",
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\nspec:\n  containers:\n    - name: c\n      image: a:1\n"
        "      securityContext:\n        privileged: true\n",
        "CKV_K8S_16",
    ),
    "dockerfile": ("Dockerfile", "FROM python:3.11.14\nRUN true\n", "CKV_DOCKER_3"),
}


@pytest.mark.parametrize("framework", BAD)
def test_checkov_finds(framework: str, tmp_path: Path) -> None:
    name, text, rule = BAD[framework]
    (tmp_path / name).write_text(text)
    _, failed = checkov(framework, tmp_path)
    assert rule in {line.split()[0] for line in failed}
