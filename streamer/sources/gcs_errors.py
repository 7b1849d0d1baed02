"""What a refusal by Google Cloud Storage means, decided by status and reason, never by the wording of a message.

Reasons are those of https://cloud.google.com/storage/docs/json_api/v1/status-codes. Refusals of reads are often plain
text without one, so the status must do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from streamer.errors import (
    AccessDeniedError,
    CredentialsError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
    SourceUnavailableError,
)
from streamer.transport.checks import retry_after
from streamer.transport.failures import CredentialsExpired, Place, classify, hide_secrets
from streamer.transport.head import ResponseHead
from streamer.transport.retry import TransientFailure

__all__ = ["classify_refusal", "refused_by_gcs"]

#: Refusals of quota that come as 403 and pass; ``dailyLimitExceeded`` does not, before tomorrow.
_RATE_REASONS = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
_PAYER_HINT = "the bucket's reader pays: set requester_pays=true, and GOOGLE_CLOUD_PROJECT to the project that pays"
_READ_HINT = "the identity needs storage.objects.get here (roles/storage.objectViewer)"
_LIST_HINT = "the identity needs storage.objects.list and storage.objects.get here (roles/storage.objectViewer)"


@dataclass(frozen=True, slots=True)
class _Said:
    reason: str = ""
    message: str = ""


def refused_by_gcs(place: Place, head: ResponseHead, body: bytes, anonymous: bool) -> Exception:
    """Return what to raise for a refused read; see `streamer.transport.reader.Refused`."""
    return classify_refusal(place, head.status, head.headers, body, anonymous=anonymous)


def classify_refusal(
    place: Place, status: int, headers: Mapping[str, str], body: bytes, *, anonymous: bool
) -> Exception:
    """Return what to raise for an error response.

    Args:
        headers: names in lower case.
        body: a JSON error document, or a line of text.
    """
    said = _parse(body)
    message = hide_secrets(said.message)

    def make(kind: type[SourceError], text: str, hint: str) -> SourceError:
        return kind(
            f"{text}: {message}" if message else text,
            hint=hint,
            url=place.url,
            start=place.start,
            end=place.end,
            status=status,
            code=said.reason or None,
            request_id=headers.get("x-guploader-uploadid"),
        )

    if status == 401 and not anonymous:
        expired = make(CredentialsError, "the store does not accept the token", "check this machine's clock, or log in")
        assert isinstance(expired, CredentialsError)
        return CredentialsExpired(expired)
    if status == 403 and said.reason in _RATE_REASONS:
        final = make(SourceUnavailableError, "the store kept refusing", "try later, or lower the concurrency")
        return TransientFailure(final, retry_after=retry_after(headers), asked_too_much=True)
    if status in (401, 403):
        return make(AccessDeniedError, "access denied", _access_hint(place, said, anonymous))
    if status == 400:
        return make(SourceError, "the store refused the request", _PAYER_HINT if _is_about_payer(said) else "")
    if status == 404 and place.is_read:
        return make(
            ObjectChangedError, "the object was replaced or deleted during the load", "load again when nobody writes"
        )
    if status == 404:
        return make(ObjectNotFoundError, "not found", "check the bucket and the URL")
    return classify(
        place,
        status,
        code=said.reason,
        message=said.message,
        request_id=headers.get("x-guploader-uploadid"),
        retry_after=retry_after(headers),
        anonymous=anonymous,
    )


def _access_hint(place: Place, said: _Said, anonymous: bool) -> str:
    if anonymous:
        return "the request was anonymous; unset `anonymous` (and STORAGE_EMULATOR_HOST) to use credentials"
    if _is_about_payer(said):
        return _PAYER_HINT
    return _READ_HINT if place.is_read else _LIST_HINT


def _is_about_payer(said: _Said) -> bool:
    # Only the hint goes by it. The reason is "required", which other things can be as well.
    return "requester pays" in said.message.lower() or said.reason.startswith("userProject")


def _parse(body: bytes) -> _Said:
    try:
        error = json.loads(body)["error"]
        reasons = [str(entry.get("reason", "")) for entry in error.get("errors", ())]
        return _Said(next(filter(None, reasons), "")[:100], str(error.get("message", ""))[:300])
    except (ValueError, KeyError, TypeError, AttributeError):
        text = body[:300].decode("utf-8", "replace")
        return _Said(message="" if text.lstrip().startswith(("<", "{")) else " ".join(text.split()))
