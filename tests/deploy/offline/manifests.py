"""What a cluster would refuse, or run otherwise than was meant, although the schemas allow it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from streamer.config import StreamConfig
from streamer.errors import ConfigError
from streamer.option_values import parse_byte_count

__all__ = ["NEWEST", "OLDEST", "problems_of", "problems_of_pod"]

#: The versions of Kubernetes that the examples are meant for: those that clouds sell support for.
OLDEST, NEWEST = "1.32", "1.37"

_GPU = "nvidia.com/gpu"
_UNITS = {"": 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}
#: What vLLM's process for one GPU takes of host memory, beside buffers: PyTorch, CUDA and the model's code.
_RUNTIME_BYTES = 5 << 30
#: Sizes of tensor parallelism, as the engines' command lines name them.
_TENSOR_PARALLEL = re.compile(r"--(?:tensor-parallel-size|tp-size)=(\d+)")


def problems_of(documents: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with the manifests of one overlay, taken together."""
    problems = []
    pods = {}
    for document in documents:
        name = f"{document['kind']}/{document['metadata']['name']}"
        if document["kind"] == "Deployment":
            template = document["spec"]["template"]
            pods[name] = template
            selector = document["spec"]["selector"]["matchLabels"]
            if not selector.items() <= template["metadata"]["labels"].items():
                problems.append(f"{name}: its selector does not match its pods")
            settings = _settings(documents, template["spec"])
            problems += problems_of_pod(template["spec"], name, settings)
            problems += _missing_objects(documents, template["spec"], name)
            problems += _deadline(document["spec"], name)
    for document in documents:
        problems += _network(document, list(pods.values()))
    return problems


def problems_of_pod(spec: dict[str, Any], name: str, settings: dict[str, str] | None = None) -> list[str]:
    """Return what is wrong with a pod, by itself.

    Args:
        settings: the variables that come from ConfigMaps.
    """
    problems = []
    volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
    settings = settings or {}
    for kind in ("initContainers", "containers"):
        for container in spec.get(kind, ()):
            where = f"{name} {container['name']}"
            problems += [f"{where}: {text}" for text in _container(container, volumes, settings)]
            if kind == "initContainers" and container.get("restartPolicy") != "Always":
                problems += [f"{where}: an init container has no {key}" for key in container if key.endswith("Probe")]
    for volume in volumes.values():
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            problems.append(f"{name}: the emptyDir {volume['name']} has no sizeLimit")
    problems += [f"{name}: {text}" for text in _handed_over(spec)]
    problems += [f"{name}: {text}" for text in _storage(spec, volumes)]
    return problems


def _container(container: dict[str, Any], volumes: dict[str, Any], settings: dict[str, str]) -> Iterator[str]:
    mounted = set()
    for mount in container.get("volumeMounts", ()):
        if mount["name"] not in volumes:
            yield f"the volume {mount['name']} does not exist"
        if not mount["mountPath"].startswith("/"):
            yield f"the mount path {mount['mountPath']} is not absolute"
        if mount["mountPath"] in mounted:
            yield f"two volumes are mounted at {mount['mountPath']}"
        mounted.add(mount["mountPath"])
    ports = [port.get("name") for port in container.get("ports", ())]
    for port in ports:
        if port is not None and not re.fullmatch(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?", port):
            yield f"{port} is no name for a port: at most 15 small letters, digits and hyphens"
    for key in ("startupProbe", "readinessProbe", "livenessProbe"):
        port = container.get(key, {}).get("httpGet", {}).get("port")
        if isinstance(port, str) and port not in ports:
            yield f"the port {port} of its {key} does not exist"
    image = container["image"]
    registry, _, rest = image.partition("/")
    if "." not in registry or not re.search(r"(:(?!latest$)[^:/]+|@sha256:[0-9a-f]{64})$", rest):
        yield f"the image {image} has no registry, or no tag that says which"
    variables = {**settings, **{entry["name"]: entry.get("value", "") for entry in container.get("env", ())}}
    for text in (*container.get("command", ()), *container.get("args", ())):
        for variable in re.findall(r"\$\((\w+)\)", text):
            if variable not in variables:
                yield f"$({variable}) is not set, and would be passed on as it is"
    try:
        StreamConfig.resolve(environ=variables)
    except ConfigError as error:
        yield f"s3stream would not start: {error}"
    read_only = container.get("securityContext", {}).get("readOnlyRootFilesystem")
    if read_only and "HOME" not in variables and any(name in image for name in ("vllm", "sglang", "fetch")):
        yield "without HOME, Python would write to a folder that is read-only"
    yield from _resources(container, volumes, variables)


def _resources(container: dict[str, Any], volumes: dict[str, Any], variables: dict[str, str]) -> Iterator[str]:
    requests, limits = (container.get("resources", {}).get(key, {}) for key in ("requests", "limits"))
    for resource in ("memory", _GPU):
        if requests.get(resource) != limits.get(resource):
            yield f"its request and its limit of {resource} differ"
    if "memory" not in limits:
        yield "it has no limit of memory"
    for resource, request in requests.items():
        if resource in limits and _amount(request) > _amount(limits[resource]):
            yield f"it requests more {resource} than its limit"
    gpus = int(limits.get(_GPU, 0))
    ranks = [int(found[1]) for text in container.get("args", ()) if (found := _TENSOR_PARALLEL.match(text))]
    if gpus and ranks != [gpus]:
        yield f"it has {gpus} GPUs and runs on {ranks}"
    if not gpus or "memory" not in limits:
        return
    in_memory = [
        _amount(volumes[mount["name"]]["emptyDir"]["sizeLimit"])
        for mount in container.get("volumeMounts", ())
        if volumes.get(mount["name"], {}).get("emptyDir", {}).get("medium") == "Memory"
    ]
    if not in_memory:
        yield "it has no emptyDir in memory for /dev/shm, whose 64 MiB are too few for NCCL"
    needed = parse_byte_count(variables.get("S3STREAM_BUFFER_BYTES", "1GiB")) + sum(in_memory) + gpus * _RUNTIME_BYTES
    if _amount(limits["memory"]) < needed:
        yield f"its limit of memory is below buffers, memory volumes and {gpus} processes, {needed} bytes"


def _handed_over(spec: dict[str, Any]) -> Iterator[str]:
    """What an init container fetches into a volume must be where the engine looks for it, and read-only there."""
    for first in spec.get("initContainers", ()):
        target = next((text for text in first.get("args", ()) if text.startswith("/")), None)
        if target is None:
            continue
        writes = [m for m in first.get("volumeMounts", ()) if target.startswith(f"{m['mountPath']}/")]
        if not writes or writes[0].get("readOnly"):
            yield f"{first['name']} writes to {target}, which is no volume of its own"
            continue
        for container in spec["containers"]:
            reads = [m for m in container.get("volumeMounts", ()) if m["name"] == writes[0]["name"]]
            if not reads or reads[0]["mountPath"] != writes[0]["mountPath"] or not reads[0].get("readOnly"):
                yield f"{container['name']} does not mount {writes[0]['name']} read-only at the same path"
            if not any(text in {target, f"--model-path={target}"} for text in container.get("args", ())):
                yield f"{container['name']} does not use {target}, which {first['name']} fetches"


def _storage(spec: dict[str, Any], volumes: dict[str, Any]) -> Iterator[str]:
    """The kubelet evicts a pod whose volumes on disk outgrow the sum of its containers' limits."""
    limits = [c.get("resources", {}).get("limits", {}).get("ephemeral-storage") for c in spec.get("containers", ())]
    on_disk = [
        _amount(volume["emptyDir"]["sizeLimit"])
        for volume in volumes.values()
        if volume.get("emptyDir", {}).get("sizeLimit") and volume["emptyDir"].get("medium") != "Memory"
    ]
    if all(limits) and sum(on_disk) > sum(_amount(limit) for limit in limits):
        yield "its volumes on disk may hold more than its containers' limits of ephemeral-storage"


def _settings(documents: list[dict[str, Any]], spec: dict[str, Any]) -> dict[str, str]:
    used = {
        entry["configMapRef"]["name"]
        for container in (*spec.get("initContainers", ()), *spec["containers"])
        for entry in container.get("envFrom", ())
    }
    maps = (d for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"] in used)
    return {key: value for document in maps for key, value in document["data"].items()}


def _missing_objects(documents: list[dict[str, Any]], spec: dict[str, Any], name: str) -> Iterator[str]:
    there = {(document["kind"], document["metadata"]["name"]) for document in documents}
    wanted = {("ServiceAccount", spec.get("serviceAccountName", "default"))}
    wanted |= {
        ("ConfigMap", entry["configMapRef"]["name"])
        for container in (*spec.get("initContainers", ()), *spec["containers"])
        for entry in container.get("envFrom", ())
    }
    for volume in spec.get("volumes", ()):
        if "persistentVolumeClaim" in volume:
            wanted.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
    for kind, missing in sorted(wanted - there):
        yield f"{name}: there is no {kind} {missing}"


def _deadline(spec: dict[str, Any], name: str) -> Iterator[str]:
    for container in spec["template"]["spec"]["containers"]:
        if probe := container.get("startupProbe"):
            longest = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
            if longest >= spec.get("progressDeadlineSeconds", 600):
                yield f"{name}: the rollout fails before {container['name']} has had {longest} s to start"


def _network(document: dict[str, Any], pods: list[dict[str, Any]]) -> Iterator[str]:
    """Services and network policies are about pods and ports that exist."""
    name = f"{document['kind']}/{document['metadata']['name']}"
    spec = document.get("spec", {})
    if document["kind"] == "Service":
        selector, ports = spec["selector"], [port.get("targetPort", port["port"]) for port in spec["ports"]]
        if document["metadata"]["name"] == "vllm":
            yield f"{name}: Kubernetes sets VLLM_PORT for it, which vLLM reads"
    elif document["kind"] == "NetworkPolicy":
        selector = spec["podSelector"]["matchLabels"]
        ports = [port["port"] for rule in spec.get("ingress", ()) for port in rule.get("ports", ())]
        for rule in spec.get("egress", ()):
            for peer in rule.get("to", ()):
                if "podSelector" in peer:
                    yield from _reaches(
                        name, peer["podSelector"]["matchLabels"], pods, [p["port"] for p in rule["ports"]]
                    )
    else:
        return
    yield from _reaches(name, selector, pods, ports)


def _reaches(name: str, selector: dict[str, str], pods: list[dict[str, Any]], ports: list[Any]) -> Iterator[str]:
    chosen = [pod["spec"] for pod in pods if selector.items() <= pod["metadata"]["labels"].items()]
    if not chosen:
        yield f"{name}: no pod has the labels {selector}"
    for pod in chosen:
        named = {port.get("name") for container in pod["containers"] for port in container.get("ports", ())}
        for port in ports:
            if isinstance(port, str) and port not in named:
                yield f"{name}: its pods have no port {port}"


def _amount(text: str) -> Decimal:
    """Read a quantity of Kubernetes', as far as the examples use them."""
    found = re.fullmatch(r"(\d+)(m|Ki|Mi|Gi|Ti|)", str(text))
    if found is None:
        raise ValueError(f"{text!r} is not understood here as a quantity")
    return Decimal(found[1]) / 1000 if found[2] == "m" else Decimal(found[1]) * 2 ** _UNITS[found[2]]
