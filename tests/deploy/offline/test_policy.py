"""The policies under parliament, which knows AWS's actions and their conditions, and under a rule about breadth."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.deploy.policies import POLICY_ARGUMENTS, golden

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it leaves its own files open, and some of its escapes are none
    import parliament

Policy = dict[str, Any]

#: parliament 1.6.4 knows access points only as what this action is about; it is about objects.
#: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html#amazons3-GetObjectAttributes
WRONG_IN_PARLIAMENT = {("RESOURCE_MISMATCH", "s3:GetObjectAttributes")}


def findings(policy: Policy) -> Iterator[str]:
    found = parliament.analyze_policy_string(json.dumps(policy), ignore_private_auditors=True).findings
    for finding in found:
        details = finding.detail if isinstance(finding.detail, list) else [finding.detail]
        for detail in details:
            action = detail.get("action") if isinstance(detail, dict) else None
            if (finding.issue, action) not in WRONG_IN_PARLIAMENT:
                yield f"{finding.issue}: {detail}"


def breadth(policy: Policy) -> Iterator[str]:
    """parliament takes ``*`` of ``*`` for what was meant."""
    for statement in policy["Statement"]:
        listed = {key: [value] if isinstance(value := statement[key], str) else value for key in ("Action", "Resource")}
        yield from (f"wildcard in the action {action}" for action in listed["Action"] if set(action) & set("*?"))
        for resource in listed["Resource"]:
            below_a_folder = re.fullmatch(r"arn:[a-z-]+:s3:::[^/*?]+/[^*?]+/\*", resource)
            if set(resource) & set("*?") and not below_a_folder:
                yield f"wildcard in the resource {resource}"
        if "s3:ListBucket" in listed["Action"]:
            prefixes = statement.get("Condition", {}).get("StringLike", {}).get("s3:prefix", ["*"])
            yield from (f"lists {prefix}" for prefix in prefixes if not prefix.endswith("/*") or "*" in prefix[:-1])
        if "kms:Decrypt" in listed["Action"] and "kms:ViaService" not in str(statement.get("Condition")):
            yield "decrypts for anybody"


@pytest.mark.parametrize("role", ["reader", "publisher"])
@pytest.mark.parametrize("name", POLICY_ARGUMENTS)
def test_policies(name: str, role: str) -> None:
    policy = golden(name)[role]
    assert list(findings(policy)) == []
    assert list(breadth(policy)) == []


def put(statement: int, key: str, value: Any) -> Callable[[Policy], None]:
    return lambda policy: policy["Statement"][statement].update({key: value})


MISTAKES: dict[str, tuple[Callable[[Policy], None], str]] = {
    "everything": (put(1, "Action", "*"), "wildcard in the action"),
    "all of S3": (put(1, "Action", "s3:*"), "wildcard in the action"),
    "every bucket": (put(1, "Resource", "*"), "RESOURCE_STAR"),
    "the whole bucket": (put(1, "Resource", "arn:aws:s3:::example-weights/*"), "wildcard in the resource"),
    "no slash": (put(1, "Resource", "arn:aws:s3:::example-weights/org/llama*"), "wildcard in the resource"),
    "lists the bucket": (lambda policy: policy["Statement"][0].pop("Condition"), "lists *"),
    "lists neighbours": (put(0, "Condition", {"StringLike": {"s3:prefix": ["org/llama*"]}}), "lists org/llama*"),
    "misspelt action": (put(1, "Action", "s3:GetObjet"), "UNKNOWN_ACTION"),
    "a bucket's ARN for objects": (put(1, "Resource", "arn:aws:s3:::example-weights"), "RESOURCE_MISMATCH"),
    "a condition that is never there": (
        put(1, "Condition", {"StringLike": {"s3:prefix": ["org/*"]}}),
        "UNKNOWN_CONDITION",
    ),
    "decrypts everywhere": (lambda policy: policy["Statement"][2].pop("Condition"), "decrypts for anybody"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str) -> None:
    spoil, said = MISTAKES[mistake]
    policy = copy.deepcopy(golden("everything")["reader"])
    spoil(policy)
    found = [*findings(policy), *breadth(policy)]
    assert any(said in text for text in found), found
