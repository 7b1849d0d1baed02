"""The reader's and the publisher's policies, as Terraform makes them; `.ci/deploy` compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["POLICY_ARGUMENTS", "golden"]

#: By the name of the committed copy: the variables of ``terraform/modules/reader-policy``.
POLICY_ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {"bucket": "example-weights", "prefixes": ["org/llama"]},
    "everything": {
        "bucket": "example-weights",
        "prefixes": ["org/llama", "org/qwen"],
        "stored_checksums": True,
        "kms_key_arn": "arn:aws:kms:eu-central-1:111122223333:key/0a1b2c3d",
    },
}


def golden(name: str) -> dict[str, dict[str, Any]]:
    """Return the policies ``reader`` and ``publisher`` for these arguments."""
    policies: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
    return policies
