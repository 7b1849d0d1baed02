"""How requests of a bucket are signed.

Ordinary buckets and access points take SigV4 for the service ``s3``. Two kinds of names need what botocore only does
when it is told no signature version, and goes by AWS's endpoint rules: directory buckets, with the credentials of a
session of five minutes and for the service ``s3express``
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-create-session.html), and Multi-Region Access
Points, with SigV4A, which has no region.
"""

from __future__ import annotations

from typing import Any

from botocore import UNSIGNED
from botocore.compat import HAS_CRT

from streamer.errors import MissingDependencyError
from streamer.sources.s3_url import S3Location

__all__ = ["follow_rules", "signature_version"]


def signature_version(location: S3Location, *, anonymous: bool) -> Any:
    """Return botocore's name of the signature; None leaves it to AWS's endpoint rules.

    Raises:
        MissingDependencyError: the signature needs a package that is not installed.
    """
    if anonymous:
        return UNSIGNED
    if location.is_multi_region and not HAS_CRT:
        raise MissingDependencyError(
            f"{location.url}: requests to Multi-Region Access Points are signed with SigV4A, which needs awscrt",
            hint="pip install awscrt, or name one of the buckets behind the access point",
        )
    # us-east-1 with a custom endpoint would otherwise presign with SigV2.
    return None if location.is_multi_region or location.is_directory else "s3v4"


def follow_rules(api: Any) -> None:
    """Have `api` presign as it signs: for the endpoint of the bucket's region, and never with SigV2.

    botocore presigns for the global endpoint, which redirects for a day after a bucket was made
    (https://docs.aws.amazon.com/AmazonS3/latest/userguide/Redirects.html), is no private network's, and for some
    aliases of access points gives hosts that do not exist.
    """
    api.meta.events.register_first("before-endpoint-resolution.s3", _at_the_region)
    if api.meta.config.signature_version is not UNSIGNED:
        api.meta.events.register_first("choose-signer.s3", _with_v4)


def _at_the_region(context: dict[str, Any], **_: Any) -> None:
    context["use_global_endpoint"] = False


def _with_v4(signature_version: str, **_: Any) -> str | None:
    # Of directory buckets without sessions (AWS_S3_DISABLE_EXPRESS_SESSION_AUTH); the others have names of their own.
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None
