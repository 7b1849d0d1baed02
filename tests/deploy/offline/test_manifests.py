"""The overlays for Kubernetes: against its schemas, oldest and newest, and against what the schemas do not say."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.offline.manifests import NEWEST, OLDEST, problems_of
from tests.deploy.offline.rendering import OVERLAYS, idle_entries, render
from tests.deploy.terraform import ROOT

TREE = ROOT / "examples" / "kubernetes"
Documents = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rendered(kubectl: str) -> dict[str, Documents]:
    return {overlay: render(kubectl, TREE, overlay) for overlay in OVERLAYS}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_schemas(overlay: str, version: str, rendered: dict[str, Documents]) -> None:
    assert len(rendered[overlay]) >= 5
    for document in rendered[overlay]:
        assert kubernetes_validate.validate(document, version, strict=True) == version


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_schemas_do_not_say(overlay: str, rendered: dict[str, Documents]) -> None:
    assert problems_of(rendered[overlay]) == []


def test_everything_in_the_overlays_has_an_effect(kubectl: str, tmp_path: Path) -> None:
    assert list(idle_entries(kubectl, TREE, tmp_path)) == []


def test_a_patch_without_a_target_is_found(kubectl: str, tmp_path: Path) -> None:
    tree = tmp_path / "spoilt"
    shutil.copytree(TREE, tree)
    path = tree / "overlays" / "eks-irsa" / "kustomization.yaml"
    path.write_text(path.read_text().replace("name: s3stream\n    # The output", "name: s3strem\n    # The output"))
    (found,) = idle_entries(kubectl, tree, tmp_path)
    assert found.startswith("overlays/eks-irsa: patches[0]")


def find(documents: Documents, kind: str, name: str = "llm") -> dict[str, Any]:
    (found,) = (d for d in documents if d["kind"] == kind and d["metadata"]["name"].startswith(name))
    return found


def engine(documents: Documents) -> dict[str, Any]:
    container: dict[str, Any] = find(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return container


def settings(documents: Documents) -> dict[str, str]:
    data: dict[str, str] = find(documents, "ConfigMap", "s3stream")["data"]
    return data


def egress(documents: Documents) -> set[tuple[str, Any]]:
    rules = find(documents, "NetworkPolicy")["spec"]["egress"]
    return {(rule["to"][0]["ipBlock"]["cidr"], rule["ports"][0]["port"]) for rule in rules if "ipBlock" in str(rule)}


def test_each_overlay_gives_an_identity(rendered: dict[str, Documents]) -> None:
    """The namespace and service account are those that Terraform's examples trust."""
    for overlay, documents in rendered.items():
        account = find(documents, "ServiceAccount", "s3stream")
        assert {d["metadata"]["namespace"] for d in documents} == {"inference"}
        annotations = account["metadata"].get("annotations", {})
        outputs = (ROOT / "terraform" / "aws" / "outputs.tf").read_text()
        wanted = set(re.findall(r'"(eks\.amazonaws\.com/[a-z-]+)" =', outputs)) if overlay == "eks-irsa" else set()
        assert set(annotations) == wanted
    trusted = {
        pair
        for path in ROOT.glob("terraform/*/examples/*/main.tf")
        for pair in re.findall(r'namespace = "([^"]+)", service_account = "([^"]+)"', path.read_text())
    }
    assert trusted == {("inference", "s3stream")}
    assert egress(rendered["eks-pod-identity"]) == {("169.254.170.23/32", 80)}
    assert egress(rendered["gke"]) == {("169.254.169.254/32", 80), ("169.254.169.252/32", 988)}
    assert settings(rendered["gke"])["MODEL_URL"].startswith("gs://")
    assert settings(rendered["minio"])["S3STREAM_ENDPOINT_URL"] == "http://minio:9000"


def test_engines_start_from_what_is_there(rendered: dict[str, Documents]) -> None:
    first = {overlay: engine(documents)["args"][0] for overlay, documents in rendered.items()}
    assert first == {
        "eks-irsa": "$(MODEL_URL)",
        "eks-pod-identity": "/models/model",
        "gke": "/models/model",
        "minio": "$(MODEL_URL)",
        "sglang": "--model-path=/models/model",
    }


def test_the_readme_is_about_these_overlays(rendered: dict[str, Documents]) -> None:
    readme = (TREE / "README.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \|", readme, re.MULTILINE)) == set(OVERLAYS)
    sums = [int(found) for found in re.findall(r"^    .* (\d+) GiB$", readme, re.MULTILINE)]
    assert f"{sum(sums)}Gi" == engine(rendered["eks-irsa"])["resources"]["limits"]["memory"]


def test_no_secret_is_committed() -> None:
    for path in (ROOT / "examples").rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            assert document["kind"] != "Secret"
            assert "secretGenerator" not in document


def template(documents: Documents) -> dict[str, Any]:
    spec: dict[str, Any] = find(documents, "Deployment")["spec"]["template"]["spec"]
    return spec


def init(documents: Documents) -> dict[str, Any]:
    container: dict[str, Any] = template(documents)["initContainers"][0]
    return container


PROBE = {"httpGet": {"path": "/", "port": 1}}
#: What to spoil, and what must then be said. The schemas allow all of them.
MISTAKES: dict[str, tuple[Callable[[Documents], Any], str]] = {
    "missing volume": (lambda d: template(d)["volumes"].pop(), "does not exist"),
    "volume twice": (lambda d: engine(d)["volumeMounts"][0].update(mountPath="/tmp"), "two volumes"),
    "relative mount": (lambda d: engine(d)["volumeMounts"][0].update(mountPath="models"), "not absolute"),
    "probe of an init container": (lambda d: init(d).update(readinessProbe=PROBE), "has no readinessProbe"),
    "long port name": (lambda d: engine(d)["ports"][0].update(name="openai-compatible"), "no name for a port"),
    "probe of another port": (lambda d: engine(d)["startupProbe"]["httpGet"].update(port="web"), "port web of its"),
    "latest": (lambda d: engine(d).update(image="registry.example.com/s3stream-vllm:latest"), "no tag"),
    "image not replaced": (lambda d: init(d).update(image="s3stream-fetch"), "no registry"),
    "unlimited volume": (lambda d: template(d)["volumes"][0].update(emptyDir={}), "no sizeLimit"),
    "unset variable": (lambda d: settings(d).pop("MODEL_URL"), "$(MODEL_URL) is not set"),
    "other limit": (lambda d: engine(d)["resources"]["limits"].update(memory="90Gi"), "of memory differ"),
    "request above limit": (
        lambda d: engine(d)["resources"]["requests"].update({"ephemeral-storage": "21Gi"}),
        "requests more ephemeral-storage",
    ),
    "too little memory": (lambda d: settings(d).update(S3STREAM_BUFFER_BYTES="64GiB"), "limit of memory is below"),
    "ranks and GPUs": (lambda d: engine(d)["args"].__setitem__(3, "--tensor-parallel-size=4"), "8 GPUs and runs on"),
    "no /dev/shm": (
        lambda d: [v["emptyDir"].pop("medium", 0) for v in template(d)["volumes"] if "emptyDir" in v],
        "/dev/shm",
    ),
    "writable hand-over": (lambda d: [m.pop("readOnly", 0) for m in engine(d)["volumeMounts"]], "read-only"),
    "hand-over elsewhere": (lambda d: init(d)["args"].__setitem__(2, "/tmp/model"), "does not mount tmp"),
    "fetched for nothing": (lambda d: engine(d)["args"].__setitem__(0, "$(MODEL_URL)"), "does not use"),
    "volumes above the limit": (
        lambda d: [engine(d)["resources"][key].update({"ephemeral-storage": "1Gi"}) for key in ("requests", "limits")],
        "volumes on disk",
    ),
    "no config": (lambda d: d.remove(find(d, "ConfigMap", "s3stream")), "there is no ConfigMap"),
    "no account": (lambda d: d.remove(find(d, "ServiceAccount", "s3stream")), "there is no ServiceAccount"),
    "deadline": (lambda d: find(d, "Deployment")["spec"].update(progressDeadlineSeconds=600), "the rollout fails"),
    "selector": (lambda d: find(d, "Service")["spec"]["selector"].update(x="y"), "no pod has the labels"),
    "service port": (lambda d: find(d, "Service")["spec"]["ports"][0].update(targetPort="web"), "have no port web"),
    "service name": (lambda d: find(d, "Service")["metadata"].update(name="vllm"), "VLLM_PORT"),
    "unknown option": (lambda d: settings(d).update(S3STREAM_BUFER_BYTES="4GiB"), "did you mean S3STREAM_BUFFER_BYTES"),
    "no home": (lambda d: engine(d).update(env=[]), "without HOME"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, rendered: dict[str, Documents]) -> None:
    spoil, said = MISTAKES[mistake]
    documents = copy.deepcopy(rendered["eks-pod-identity"])
    spoil(documents)
    problems = problems_of(documents)
    assert any(said in problem for problem in problems), problems


def test_a_misspelt_field_is_found(rendered: dict[str, Documents]) -> None:
    documents = copy.deepcopy(rendered["eks-irsa"])
    engine(documents)["readinesProbe"] = engine(documents).pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(find(documents, "Deployment"), NEWEST, strict=True)
