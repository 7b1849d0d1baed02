"""What a store's refusal means, decided by status and error code, never by the wording of a message.

One table for listing, HEAD and bodies, native and through the SDK. Codes are those of
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from streamer.errors import (
    AccessDeniedError,
    BadResponseError,
    CredentialsError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
    SourceUnavailableError,
)
from streamer.transport.retry import TransientFailure

__all__ = [
    "OPEN_FILES_HINT",
    "CredentialsExpired",
    "Place",
    "WrongRegion",
    "bad_response",
    "classify",
    "hide_secrets",
    "is_out_of_files",
    "unavailable",
]

OPEN_FILES_HINT = "raise the limit of open files (ulimit -n), or lower the concurrency"

_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_IDENTITY = {
    "InvalidAccessKeyId": "the store does not know this access key; check the profile and the endpoint",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key, or a proxy changed the request",
    "InvalidToken": "the session token is malformed or belongs to other keys",
    "InvalidClientTokenId": "the access key does not exist",
    "InvalidSecurity": "the store does not know this access key; GCS wants an HMAC key of a service account or user",
    "AuthFailure": "check the credentials",
    "RequestTimeTooSkewed": "set this machine's clock",
    "NotSignedUp": "the account has no access to the service",
}
_TRANSIENT_CODES = frozenset(
    {
        "SlowDown",
        "InternalError",
        "ServiceUnavailable",
        "RequestTimeout",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "TooManyRequestsException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "OperationAborted",
        "KMS.ThrottlingException",
    }
)
_KMS_HINT = "the identity needs kms:Decrypt for the key that the object is encrypted with"
_SIGNED = re.compile(
    r"((?:signature|security-token|credential)(?:=|%3D)|x-amz-security-token['\"]?:\s*['\"]?"
    r"|authorization['\"]?:\s*['\"]?(?:basic|bearer)\s+|access_token['\"]?[=:]\s*['\"]?|\bya29\.)[^\s&,;\"'<>]+",
    re.IGNORECASE,
)
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_REGION_CODES = frozenset(
    {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)


@dataclass(frozen=True, slots=True)
class Place:
    """Which object (or prefix) and range an error is about; see `SourceError`.

    Attributes:
        version: of the object, if the request names one.
        action: the permission that the request needs, if it is not clear from the rest.
    """

    url: str
    start: int | None = None
    end: int | None = None
    version: str | None = None
    action: str | None = None

    @property
    def is_read(self) -> bool:
        return self.start is not None


class CredentialsExpired(Exception):
    """The store says the credentials or the signed URL expired; renewing them once is worth a try."""

    def __init__(self, final: CredentialsError) -> None:
        super().__init__(final.message)
        self.final = final


class WrongRegion(SourceError):
    """The store says where the bucket is; a client for that region may be tried once."""

    region = ""


def classify(
    place: Place,
    status: int,
    *,
    code: str = "",
    message: str = "",
    request_id: str | None = None,
    region: str = "",
    retry_after: float | None = None,
    anonymous: bool = False,
) -> SourceError | TransientFailure | CredentialsExpired:
    """Return what to raise for an error response.

    Args:
        place: for the message.
        status: the HTTP status.
        code, message: from the error document; `message` is only quoted.
        region: where the store says the bucket is.
        retry_after: seconds, from the header of that name.
        anonymous: requests are unsigned.
    """

    def make(kind: type[SourceError], text: str, hint: str | None = None) -> SourceError:
        said = f"{text}: {hide_secrets(message)}" if message else text
        return kind(
            said,
            hint=hint,
            url=place.url,
            start=place.start,
            end=place.end,
            status=status,
            code=code or None,
            request_id=request_id,
        )

    if code in _EXPIRED:
        expired = make(CredentialsError, "the credentials have expired", "log in again or refresh them")
        assert isinstance(expired, CredentialsError)
        return CredentialsExpired(expired)
    if code in _IDENTITY:
        return make(CredentialsError, "the store does not accept the credentials", _IDENTITY[code])
    if code in _REGION_CODES or status in (301, 302, 307, 308):
        hint = f"set region={region}" if region else "set the bucket's region, or check the endpoint"
        wrong = make(WrongRegion, "the bucket is in another region or behind another endpoint", hint)
        assert isinstance(wrong, WrongRegion)
        wrong.region = region
        return wrong
    if code == "InvalidObjectState":
        return make(AccessDeniedError, "the object is archived", "restore it to a readable storage class first")
    if status in (401, 403):
        return make(AccessDeniedError, "access denied", _access_hint(place, anonymous, message))
    if code.startswith("KMS.") and code not in _TRANSIENT_CODES:
        return make(AccessDeniedError, "the object's KMS key cannot be used", f"{_KMS_HINT}, which must be enabled")
    if status == 400 and not code and not anonymous:
        return _perhaps_expired(place, request_id)
    if status == 412:
        return make(ObjectChangedError, "the object changed during the load", "load again when nobody writes to it")
    if status == 416:
        return make(ObjectChangedError, "the object is now shorter than when it was listed", "load again")
    if status == 404 and place.version is not None:
        gone = f"version {place.version} of the object was deleted during the load"
        return make(ObjectChangedError if place.is_read else ObjectNotFoundError, gone, "load again")
    if status == 404 and place.is_read:
        return make(ObjectChangedError, "the object was deleted during the load")
    if status == 404:
        what = "no such bucket" if code == "NoSuchBucket" else "not found"
        return make(ObjectNotFoundError, what, "check the URL, the endpoint and the region")
    if status in _TRANSIENT_STATUSES or code in _TRANSIENT_CODES:
        final = make(SourceUnavailableError, "the store kept refusing", "try later, or lower the concurrency")
        return TransientFailure(final, retry_after=retry_after)
    return make(SourceError, "the store refused the request")


def hide_secrets(message: str) -> str:
    """Blot out what signs a request or is a token: some gateways quote the whole of a request in their errors."""
    return _SIGNED.sub(r"\1***", message)


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether this process, or the machine, may not open any more files."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _perhaps_expired(place: Place, request_id: str | None) -> CredentialsExpired:
    """A 400 that gives no reason: expired credentials are refused so where there is no room for one, in the answer to
    a HEAD, and where it was lost on the way."""
    final = CredentialsError(
        "the store refused the request without a reason, as it does when credentials have expired",
        hint="log in again or refresh them, or check the region",
        url=place.url,
        start=place.start,
        end=place.end,
        status=400,
        request_id=request_id,
    )
    return CredentialsExpired(final)


def _access_hint(place: Place, anonymous: bool, message: str) -> str:
    if anonymous:
        return "the request was anonymous; unset `anonymous` to use credentials"
    # The message may name what the identity lacks, or which kind of policy denies; only hints go by it.
    # https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot_access-denied.html
    if "kms:" in message:
        return _KMS_HINT
    action = place.action
    if action is None and place.version is not None:
        action = "s3:GetObjectVersion, because of pin=version,"
    if action is None:
        action = "s3:GetObject" if place.is_read else "s3:ListBucket and s3:GetObject"
    if "VPC endpoint polic" in message:
        return f"the policy of the VPC endpoint must allow {action} here; the identity's own permissions do not count"
    if "explicit deny" in message:
        return f"a policy denies {action} here explicitly, which no permission outweighs; change that policy"
    return (
        f"the identity needs {action} here; for a public bucket set anonymous=true, and where the requester pays "
        "requester_pays=true"
    )


def bad_response(place: Place, status: int | None, why: str) -> TransientFailure:
    """An answer that contradicts the request: asked again twice, because a proxy may have been restarted."""
    final = BadResponseError(
        f"the store answered with something else than was asked for: {why}",
        hint="check what stands between this machine and the store",
        url=place.url,
        start=place.start,
        end=place.end,
        status=status,
    )
    return TransientFailure(final, most_attempts=3)


def unavailable(place: Place, why: str, *, hint: str | None = None, free: bool = False) -> TransientFailure:
    """No answer, or half of one: asked again as often as the policy allows."""
    final = SourceUnavailableError(why, hint=hint, url=place.url, start=place.start, end=place.end)
    return TransientFailure(final, free=free)
