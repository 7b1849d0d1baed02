"""From whatever goes wrong on the way to credentials to one error that says what to do about it.

Roles and SSO are resolved when a request is signed, so their failures turn up in the middle of a listing
or a read, as exceptions of another service, of its transport, or of the files that hold its tokens.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Mapping
from typing import Any

import botocore.exceptions as aws

from streamer.errors import CredentialsError
from streamer.transport.failures import (
    OPEN_FILES_HINT,
    Place,
    classify,
    is_out_of_files,
    unavailable,
)
from streamer.transport.retry import TransientFailure

__all__ = [
    "CREDENTIAL_ERRORS",
    "IDENTITY_OPERATIONS",
    "endpoint_hint",
    "no_credentials",
    "refused_identity",
    "unreadable_credentials",
]

_LOGIN = (aws.SSOError, aws.TokenRetrievalError, getattr(aws, "LoginError", aws.SSOError))

#: What botocore raises when a source of credentials is there but does not give any.
CREDENTIAL_ERRORS: tuple[type[Exception], ...] = (
    *_LOGIN,
    aws.PartialCredentialsError,
    aws.CredentialRetrievalError,
    aws.MetadataRetrievalError,
    aws.NoAuthTokenError,
    aws.RefreshWithMFAUnsupportedError,
    aws.InvalidConfigError,
    aws.UnknownCredentialError,
)

#: Operations by which STS, SSO and sign-in give credentials.
IDENTITY_OPERATIONS = frozenset(
    {"AssumeRole", "AssumeRoleWithWebIdentity", "GetRoleCredentials", "CreateToken", "CreateOAuth2Token"}
)


class _HidePasswords(logging.Filter):
    """aiobotocore logs a failed renewal as a warning, with a traceback that aiohttp puts the proxy's password in."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0]:
            text = "".join(traceback.format_exception(*record.exc_info))
            record.exc_text = re.sub(r"//[^\s/]*@", "//", text).rstrip()  # what formatters then use
        return True


for _name in ("aiobotocore.credentials", "aiobotocore.tokens"):
    logging.getLogger(_name).addFilter(_HidePasswords())


def no_credentials(url: str | None) -> CredentialsError:
    """Nothing anywhere: say where we looked, as botocore does."""
    return CredentialsError(
        "no credentials were found in the environment, the profile (keys, role, SSO, credential_process), a web "
        "identity token, a container's agent or the instance's role",
        hint="configure them as for the AWS CLI, or set anonymous=true for a public bucket",
        url=url,
    )


def unreadable_credentials(error: Exception, url: str | None) -> CredentialsError:
    """A source of credentials is configured and does not give any."""
    if isinstance(error, _LOGIN):
        hint = "run `aws sso login` with this profile"
    elif isinstance(error, ValueError):
        hint = "credential_process must print the JSON that the AWS CLI expects, and nothing else"
    elif is_out_of_files(error):
        hint = OPEN_FILES_HINT
    else:
        hint = "check the profile, role and token files that the AWS variables name"
    # The text of an OSError names the file; that of a ValueError quotes an expiry time at most.
    return CredentialsError(f"the credentials could not be had: {' '.join(str(error).split())}", hint=hint, url=url)


def refused_identity(
    place: Place, operation: str, status: int, detail: Mapping[str, Any], request_id: str | None
) -> Exception:
    """STS or SSO answered with an error: a passing one is worth another try, any other is final."""
    code, message = str(detail.get("Code", "")), str(detail.get("Message", ""))
    if isinstance(classify(place, status, code=code), TransientFailure):
        return unavailable(place, f"{operation} was refused: {message or code}", hint="try later")
    hint = "check the role, its trust policy and the token it is asked for with"
    if operation in {"GetRoleCredentials", "CreateToken"}:
        hint = "run `aws sso login` with this profile, and check its account and role"
    return CredentialsError(
        f"the credentials could not be had: {operation} was refused: {message or code or 'no reason given'}",
        hint=endpoint_hint() or hint,
        url=place.url,
        status=status,
        code=code or None,
        request_id=request_id,
    )


def endpoint_hint() -> str | None:
    """Say so if STS and SSO are looked for at the store, where they hardly are."""
    if os.environ.get("AWS_ENDPOINT_URL"):
        return "AWS_ENDPOINT_URL redirects STS and SSO as well; set AWS_ENDPOINT_URL_S3 or endpoint_url instead"
    return None
