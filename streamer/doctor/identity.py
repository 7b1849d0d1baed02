"""Who a load would be: where its credentials come from and how long they last. Never the credentials."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from aiobotocore.session import AioSession

from streamer.config import StreamConfig
from streamer.doctor.checks import Finding
from streamer.errors import CredentialsError
from streamer.sources.s3_client import find_credentials, translated
from streamer.transport.failures import Place

__all__ = ["identify"]

#: What botocore calls the ways to credentials, in words; `METHOD` of its providers.
_SOURCES = {
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the shared credentials file",
    "config-file": "the AWS configuration file",
    "assume-role": "a role that the profile assumes",
    "assume-role-with-web-identity": "a web identity token",
    "sso": "SSO",
    "login": "a login by `aws login`",
    "custom-process": "the profile's credential_process",
    "container-role": "the container's or pod's agent",
    "iam-role": "the instance's role (IMDS)",
}
_SHORT_SECONDS = 900.0


async def identify(config: StreamConfig, url: str, region: str) -> Finding:
    """Find the credentials and ask for them, as signing a request does; the store is not asked who they are.

    Raises:
        CredentialsError: there are none, or their source does not give any.
        TransientFailure: it did not answer.
    """
    if config.anonymous:
        return Finding("nobody: requests are not signed, because anonymous is on")
    session = AioSession(profile=config.profile)
    session.set_config_variable("region", region)  # STS is asked there, as a load does
    async with translated(Place(url), anonymous=False):
        found = await find_credentials(session, url)
        frozen = await found.get_frozen_credentials()
    if not frozen.access_key or not frozen.secret_key:
        raise CredentialsError(
            f"the credentials from {_SOURCES.get(found.method, found.method)} are only half there",
            hint="give both the access key and the secret key",
        )
    text = f"{masked(frozen.access_key)} from {_SOURCES.get(found.method, found.method)}{_role(session, found.method)}"
    if frozen.token:
        text += ", with a session token"
    expiry: datetime | None = getattr(found, "_expiry_time", None)  # botocore has no public name for it
    if expiry is None:
        temporary = "they end some day, and nothing renews them; a load that lasts longer fails"
        return Finding(text, temporary if frozen.token else None)
    left = (expiry - datetime.now(UTC)).total_seconds()
    text += f", until {expiry.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return Finding(text, "they end within 15 minutes; see that they are renewed" if left < _SHORT_SECONDS else None)


def _role(session: AioSession, method: str) -> str:
    """Name the role, where the configuration does."""
    scoped: Mapping[str, Any] = session.get_scoped_config()
    role = scoped.get("role_arn") if method.startswith("assume-role") else None
    if method == "assume-role-with-web-identity" and role is None:
        role = os.environ.get("AWS_ROLE_ARN")
    if method == "sso":
        role = scoped.get("sso_role_name")
    return f", {role}" if role else ""


def masked(access_key: str) -> str:
    """Enough of an access key id to recognise it by."""
    return f"{access_key[:4]}...{access_key[-4:]}" if len(access_key) >= 12 else f"{access_key[:2]}..."
