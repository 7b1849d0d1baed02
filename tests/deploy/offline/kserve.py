"""Holds manifests against KServe's own field tables, which lie in its Python package.

They are read as text: importing the package would install half of the ecosystem. Where a field is of a kind of
Kubernetes', its part is checked as such.
"""

from __future__ import annotations

import ast
import re
import zipfile
from pathlib import Path
from typing import Any

import kubernetes_validate

__all__ = ["KServe"]

_KINDS = {
    "ClusterStorageContainer": "V1alpha1ClusterStorageContainer",
    "InferenceService": "V1beta1InferenceService",
    "ServingRuntime": "V1alpha1ServingRuntime",
}
_PLAIN = {"str": str, "bool": bool, "int": int}
_CONTAINER = {"name": "x", "image": "x"}
#: Where the fields of Kubernetes' types in these belong.
_PARTS = {"V1alpha1ServingRuntimeSpec": "pod", "V1beta1PredictorSpec": "pod", "V1beta1ModelSpec": "container"}


class KServe:
    """The field tables of one version.

    Args:
        wheel: of the package ``kserve``.
        version: of Kubernetes, for its parts.
    """

    def __init__(self, wheel: Path, version: str) -> None:
        self._version = version
        with zipfile.ZipFile(wheel) as packed:
            self._sources = {
                Path(name).stem: packed.read(name).decode()
                for name in packed.namelist()
                if name.startswith("kserve/models/v1")
            }

    def problems(self, document: dict[str, Any]) -> list[str]:
        """Return what is wrong with a manifest, each with its place."""
        kind = document.get("kind")
        if kind not in _KINDS:
            return [f"$: the kind {kind} is not known here"]
        missing = [f"$.{name}: missing" for name in ("apiVersion", "metadata", "spec") if name not in document]
        return missing + self._check(document, _KINDS[kind], "$")

    def _table(self, name: str) -> dict[str, str] | None:
        """Return types by field names, as manifests spell them; None when `name` is no type of KServe's."""
        module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
        if module not in self._sources:
            return None
        tables = {}
        for node in ast.walk(ast.parse(self._sources[module])):
            match node:
                case ast.Assign(targets=[ast.Name(id="openapi_types" | "attribute_map" as table)]):
                    tables[table] = ast.literal_eval(node.value)
        return {spelt: tables["openapi_types"][field] for field, spelt in tables["attribute_map"].items()}

    def _check(self, value: Any, kind: str, path: str) -> list[str]:
        if inner := re.fullmatch(r"list\[(.+)\]", kind):
            if not isinstance(value, list):
                return [f"{path}: not a list"]
            return [each for i, item in enumerate(value) for each in self._check(item, inner[1], f"{path}[{i}]")]
        if inner := re.fullmatch(r"dict\(str, (.+)\)", kind):
            return [each for key, item in value.items() for each in self._check(item, inner[1], f"{path}.{key}")]
        if kind in _PLAIN:
            return [] if isinstance(value, _PLAIN[kind]) else [f"{path}: not of type {kind}"]
        if kind == "V1ObjectMeta":
            return self._as_kubernetes({"apiVersion": "v1", "kind": "ConfigMap", "metadata": value}, path)
        table = self._table(kind)
        if table is None:
            return [f"{path}: {kind} is not checked here"]
        problems, parts = [], {}
        for field, item in value.items():
            if field not in table:
                problems.append(f"{path}.{field}: unknown field of {kind}")
            elif kind in _PARTS and re.search(r"\bV1[A-Z]", table[field]):
                parts[field] = item
            elif table[field] == "V1Container":
                problems += self._as_pod({"containers": [item]}, f"{path}.{field}")
            else:
                problems += self._check(item, table[field], f"{path}.{field}")
        if parts:
            pod = parts if _PARTS[kind] == "pod" else {"containers": [{**_CONTAINER, **parts}]}
            problems += self._as_pod({"containers": [_CONTAINER], **pod}, path)
        return problems

    def _as_pod(self, spec: dict[str, Any], path: str) -> list[str]:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        return self._as_kubernetes(pod, path)

    def _as_kubernetes(self, document: dict[str, Any], path: str) -> list[str]:
        try:
            kubernetes_validate.validate(document, self._version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{path}: {error.message}"]
        return []
