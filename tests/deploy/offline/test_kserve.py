"""The manifests for KServe, against its own field tables, and what these do not say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.offline.kserve import KServe
from tests.deploy.offline.manifests import NEWEST, problems_of_pod
from tests.deploy.terraform import ROOT

FILES = sorted((ROOT / "examples" / "kserve").glob("*.yaml"))


@pytest.fixture(scope="module")
def kserve(wheels: Path) -> KServe:
    (wheel,) = wheels.glob("kserve-*.whl")
    return KServe(wheel, NEWEST)


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "kserve" / f"{name}.yaml").read_text())
    return document


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_fields(path: Path, kserve: KServe) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert not kserve.problems(document)


def test_the_container_is_one_that_kserve_recognises() -> None:
    spec = read("clusterstoragecontainer")["spec"]
    assert spec["container"]["name"] == "storage-initializer"
    assert "args" not in spec["container"], "KServe's own, SRC DEST, would be lost"
    assert spec["container"]["command"] == ["s3stream", "fetch", "--mode", "metadata"]
    assert spec["supportedUriFormats"] == [{"prefix": "s3stream://"}], "s3:// is claimed by KServe's default container"


def test_the_service_uses_them() -> None:
    model = read("inferenceservice")["spec"]["predictor"]["model"]
    runtime = read("servingruntime")
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [known["name"] for known in runtime["spec"]["supportedModelFormats"]]
    (prefix,) = (known["prefix"] for known in read("clusterstoragecontainer")["spec"]["supportedUriFormats"])
    assert model["storageUri"].startswith(prefix)
    assert runtime["spec"]["containers"][0]["args"][0] == "/mnt/models", "where KServe has it fetched to"


def test_the_runtime_is_a_sound_pod() -> None:
    assert not problems_of_pod(read("servingruntime")["spec"], "servingruntime")


def at(document: dict[str, Any], *keys: Any) -> Any:
    for key in keys:
        document = document[key]
    return document


def misspell(wrong: str, right: str, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        where = at(document, *keys)
        where[wrong] = where.pop(right)

    return change


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "clusterstoragecontainer",
            misspell("supportedURIFormats", "supportedUriFormats", "spec"),
            "supportedURIFormats",
        ),
        ("clusterstoragecontainer", misspell("imge", "image", "spec", "container"), "imge"),
        ("clusterstoragecontainer", misspell("workLoadType", "workloadType", "spec"), "workLoadType"),
        ("clusterstoragecontainer", misspell("lables", "name", "metadata"), "lables"),
        ("inferenceservice", misspell("storageURL", "storageUri", "spec", "predictor", "model"), "storageURL"),
        ("inferenceservice", misspell("serviceAcountName", "serviceAccountName", "spec", "predictor"), "serviceAcount"),
        ("servingruntime", misspell("mountpath", "mountPath", "spec", "containers", 0, "volumeMounts", 0), "mountPath"),
        ("servingruntime", misspell("emptydir", "emptyDir", "spec", "volumes", 0), "emptydir"),
    ],
)
def test_mistakes_are_found(name: str, change: Callable[[dict[str, Any]], None], said: str, kserve: KServe) -> None:
    document = copy.deepcopy(read(name))
    change(document)
    problems = kserve.problems(document)
    assert problems
    assert said in problems[0]
