"""The Dockerfiles: hadolint, the build stage run in a folder, and what must agree with the rest of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from streamer import __version__
from tests.deploy.offline.conftest import program
from tests.deploy.terraform import ROOT

FOLDER = ROOT / "examples" / "docker"


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    command = [program("hadolint"), "--no-color", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def read(name: str) -> str:
    return re.sub(r"\\\n\s*", "", (FOLDER / f"Dockerfile.{name}").read_text())


@pytest.mark.parametrize("name", ["fetch", "vllm"])
def test_hadolint(name: str) -> None:
    done = hadolint(FOLDER / f"Dockerfile.{name}")
    assert done.returncode == 0, done.stdout


BAD = {
    "DL3007": "FROM python:latest\n",
    "DL3006": "FROM python\n",
    "DL3013": "FROM python:3.11.14\nRUN pip install --no-cache-dir requests\n",
    "DL3002": "FROM python:3.11.14\nUSER root\n",
    "DL3025": "FROM python:3.11.14\nENTRYPOINT s3stream\n",
}


@pytest.mark.parametrize("rule", BAD)
def test_hadolint_finds(rule: str, tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(BAD[rule])
    done = hadolint(path)
    assert done.returncode != 0
    assert rule in done.stdout


@pytest.mark.parametrize("name", ["fetch", "vllm"])
def test_images_run_as_somebody(name: str) -> None:
    users = re.findall(r"^USER (\d+):\d+$", read(name), re.MULTILINE)
    assert users
    assert users[-1] != "0"
    if name == "vllm":
        deployment = yaml.safe_load((ROOT / "examples/kubernetes/base/deployment.yaml").read_text())
        assert str(deployment["spec"]["template"]["spec"]["securityContext"]["runAsUser"]) == users[-1]


def test_versions_agree() -> None:
    newest = re.findall(r"\.ci/vllm-environment \S+ ([\d.]+)", (ROOT / ".ci" / "run").read_text())[0]
    assert f"ARG VLLM=v{newest}\n" in read("vllm")
    tags = set()
    for path in (ROOT / "examples").rglob("*"):
        if path.is_file():
            text = path.read_text().replace("\n    newTag: ", ":")
            tags |= set(re.findall(r"/(s3stream-(?:vllm|fetch)):([\w.-]+)", text))
    assert tags == {("s3stream-vllm", f"v{newest}-{__version__}"), ("s3stream-fetch", __version__)}


@pytest.mark.parametrize("name", ["fetch", "vllm"])
def test_the_context_has_what_is_copied(name: str) -> None:
    """What .dockerignore leaves out of the context cannot be copied."""
    kept = (FOLDER / f"Dockerfile.{name}.dockerignore").read_text().split()
    for line in re.findall(r"^COPY (?!--from)(.+)$", read(name), re.MULTILINE):
        *sources, _target = line.split()
        for source in sources:
            assert f"!{source}" in kept
            assert (ROOT / source).exists()


def build(name: str, folder: Path) -> Path:
    """Run the build stage of a Dockerfile in `folder`, as there is no Docker here; return where /opt would be."""
    stage = read(name).split("\nFROM ")[1]
    places = {"/src": folder / "src", "/wheels": folder / "wheels", "/opt": folder / "opt"}

    def moved(text: str) -> str:
        for inside, outside in places.items():
            text = re.sub(rf"(?<![\w.]){inside}(?=[/\s]|$)", str(outside), text)
        return text

    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    (folder / "src").mkdir()
    for keyword, rest in re.findall(r"^(COPY|ENV|ARG|RUN) (.+)$", stage, re.MULTILINE):
        if keyword == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, moved(target), ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, moved(target))
        elif keyword == "RUN":
            command = moved(re.sub(r"\bpython -m", f"{sys.executable} -m", rest))
            done = subprocess.run(["sh", "-euc", command], env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            environment |= dict(entry.split("=", 1) for entry in moved(rest).split())
    return folder / "opt"


def test_the_build_of_the_fetch_image(tmp_path: Path) -> None:
    binaries = build("fetch", tmp_path) / "s3stream" / "bin"
    assert not list(binaries.glob("pip*")), "it is of no use in the image"
    environment = {"PATH": str(binaries), "HOME": "/nowhere"}

    def run(*arguments: str) -> str:
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
        return done.stdout

    assert run(str(binaries / "s3stream"), "--version").split() == ["s3stream", __version__]
    assert "s3://" in run(str(binaries / "s3stream"), "inspect", "--help")
    listed = run(
        str(binaries / "python"),
        "-c",
        "from importlib.metadata import distributions as d; print(*(f'{x.name}=={x.version}' for x in d()))",
    )
    installed = {text.lower().replace("_", "-") for text in listed.split() if not text.startswith("s3stream")}
    pinned = {
        line.lower().replace("_", "-")
        for line in (FOLDER / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    assert installed <= pinned, f"without a pin: {sorted(installed - pinned)}"
    assert "torch" not in {text.split("==")[0] for text in installed}
