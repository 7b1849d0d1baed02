"""What IAM would say to a request of S3, for policies that only allow."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "allows", "call_of"]

#: Sub-resources of a bucket or an object, by which a GET of it is another operation.
_SUBRESOURCES = {
    "attributes": "GetObjectAttributes",
    "location": "GetBucketLocation",
    "policy": "GetBucketPolicy",
    "uploads": "ListMultipartUploads",
    "versioning": "GetBucketVersioning",
    "versions": "ListObjectVersions",
}
_BUCKET = {"GET": "ListObjects", "HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}
_OBJECT = {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject"}
#: Permissions that are not called as the operation is.
#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
_PERMISSIONS = {
    "HeadBucket": ["ListBucket"],
    "HeadObject": ["GetObject"],
    "ListBuckets": ["ListAllMyBuckets"],
    "ListObjects": ["ListBucket"],
    "ListObjectsV2": ["ListBucket"],
    "GetObjectAttributes": ["GetObject", "GetObjectAttributes"],
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    Attributes:
        name: the operation, as the API calls it; with ``Version`` after it when the request names one.
        permissions: all of which it takes, with ``s3:`` in front.
        context: the condition keys that it carries.
    """

    name: str
    resource: str
    permissions: tuple[str, ...]
    context: Mapping[str, str]


def call_of(method: str, path: str, query: Mapping[str, str]) -> Call:
    """Return which operation of S3 a path-style request is.

    Args:
        path: unquoted, from ``/``.
        query: without what signs the request.
    """
    bucket, _, key = path.removeprefix("/").partition("/")
    special = [name for part, name in _SUBRESOURCES.items() if part in query]
    if not bucket:
        name = "ListBuckets"
    elif special:
        (name,) = special
    elif not key:
        name = "ListObjectsV2" if query.get("list-type") == "2" else _BUCKET[method]
    else:
        name = _OBJECT.get(method, f"{method} of an object")
    permissions = _PERMISSIONS.get(name, [name])
    if "versionId" in query:
        name += "Version"
        permissions = [permission.replace("GetObject", "GetObjectVersion") for permission in permissions]
    context = {"s3:prefix": query["prefix"]} if "prefix" in query else {}
    resource = f"arn:aws:s3:::{bucket}" + (f"/{key}" if key else "")
    return Call(name, resource, tuple(f"s3:{permission}" for permission in permissions), context)


def allows(policy: Mapping[str, Any], call: Call) -> bool:
    """Whether `policy` gives all permissions that `call` takes.

    Raises:
        ValueError: it holds something that is not understood here.
    """
    return all(
        any(_allows(statement, permission, call) for statement in policy["Statement"])
        for permission in call.permissions
    )


def _allows(statement: Mapping[str, Any], permission: str, call: Call) -> bool:
    if statement["Effect"] != "Allow" or not set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}:
        raise ValueError(f"{statement} is not a plain Allow")
    return (
        _matches(permission, statement["Action"])
        and _matches(call.resource, statement["Resource"])
        and all(
            _holds(operator, call.context.get(key), values)
            for operator, conditions in statement.get("Condition", {}).items()
            for key, values in conditions.items()
        )
    )


def _holds(operator: str, found: str | None, values: str | Sequence[str]) -> bool:
    """A key that the request does not carry fulfils no condition (but those of ``IfExists``, which are not used)."""
    if operator == "StringLike":
        return found is not None and _matches(found, values)
    if operator == "StringEquals":
        return found is not None and found in ([values] if isinstance(values, str) else values)
    raise ValueError(f"the condition operator {operator} is not understood here")


def _matches(text: str, patterns: str | Sequence[str]) -> bool:
    """IAM's wildcards are ``*`` and ``?``, across slashes."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(text, pattern.replace("[", "[[]")) for pattern in patterns)
