"""Renders overlays with ``kubectl kustomize``, and finds patches that change nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.terraform import ROOT

__all__ = ["OVERLAYS", "idle_entries", "render"]

OVERLAYS = tuple(sorted(path.parent.name for path in ROOT.glob("examples/kubernetes/overlays/*/kustomization.yaml")))


def render(kubectl: str, tree: Path, overlay: str) -> list[dict[str, Any]]:
    """Return the manifests of an overlay.

    Args:
        tree: a folder like ``examples/kubernetes``.
    """
    done = subprocess.run(
        [kubectl, "kustomize", str(tree / "overlays" / overlay)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def idle_entries(kubectl: str, tree: Path, scratch: Path) -> Iterator[str]:
    """Name every patch, image and component without which all overlays would be the same.

    kustomize takes a patch whose target matches nothing, and an image that nobody uses, without a word.

    Args:
        tree: a folder like ``examples/kubernetes``.
        scratch: an empty folder, in which each is left out in turn.
    """
    whole = {overlay: render(kubectl, tree, overlay) for overlay in OVERLAYS}
    copy = scratch / "tree"
    shutil.copytree(tree, copy)
    for path in sorted(copy.rglob("kustomization.yaml")):
        text = path.read_text()
        document = yaml.safe_load(text)
        for kind in ("patches", "images", "components"):
            entries = document.get(kind, [])
            for number, entry in enumerate(entries):
                rest = entries[:number] + entries[number + 1 :]
                path.write_text(yaml.safe_dump({**document, kind: rest}))
                if not any(render(kubectl, copy, overlay) != whole[overlay] for overlay in OVERLAYS):
                    yield f"{path.parent.relative_to(copy)}: {kind}[{number}], {entry}"
        path.write_text(text)
