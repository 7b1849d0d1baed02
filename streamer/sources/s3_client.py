"""The S3 control plane: one client configuration, as botocore resolves it, for every kind of request."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import botocore.exceptions as aws
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.parsers import ResponseParserError

from streamer.config import StreamConfig
from streamer.errors import BadResponseError, ConfigError, CredentialsError, SourceError, StreamError
from streamer.sources.network import proxy_url, resolve_verify
from streamer.sources.s3_identity import (
    CREDENTIAL_ERRORS,
    IDENTITY_OPERATIONS,
    endpoint_hint,
    no_credentials,
    refused_identity,
    unreadable_credentials,
)
from streamer.sources.s3_signing import follow_rules, signature_version
from streamer.sources.s3_url import S3Location
from streamer.transport.checks import retry_after
from streamer.transport.failures import OPEN_FILES_HINT, Place, classify, is_out_of_files, unavailable
from streamer.transport.pool import Proxy, proxy_for
from streamer.transport.retry import TransientFailure
from streamer.transport.tls_errors import explain_tls_failure

__all__ = ["DEFAULT_REGION", "S3Client", "find_credentials", "open_s3_client", "translated"]

DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class S3Client:
    """An open client, with what the data plane must share with it."""

    api: Any
    region: str
    proxy: Proxy | None
    verify: str | bool
    stack: contextlib.AsyncExitStack


async def open_s3_client(
    config: StreamConfig, location: S3Location, *, region: str | None = None, unsigned: bool = False
) -> S3Client:
    """Create a session and a client; credentials are looked up, S3 is not contacted.

    Args:
        location: what they are for; its kind decides how requests are signed.
        region: overrides what the configuration and botocore say, after the store has told us better.
        unsigned: look for no credentials, whatever the configuration says.

    Raises:
        ConfigError: a profile, region or endpoint that botocore refuses.
        CredentialsError: there are none, they are only half there, or their provider failed.
        MissingDependencyError: this kind of location needs a package that is not installed.
    """
    url = location.url
    _refuse_keys(config.endpoint_url)
    session = AioSession(profile=config.profile)
    try:
        region = region or config.region or session.get_config_variable("region") or DEFAULT_REGION
        verify = resolve_verify(config, session.get_config_variable("ca_bundle"))
        session.set_config_variable("region", region)  # STS is asked in the same region, as botocore does
        unsigned = unsigned or config.anonymous
        if not unsigned:
            await find_credentials(session, url)
        stack = contextlib.AsyncExitStack()
        api = await stack.enter_async_context(
            session.create_client(
                "s3",
                region_name=region,
                endpoint_url=config.endpoint_url,
                verify=verify,
                config=_client_config(config, location, unsigned=unsigned),
            )
        )
        follow_rules(api)
    except aws.ProfileNotFound as error:
        raise ConfigError(f"there is no profile {error.kwargs.get('profile')!r}", hint="see ~/.aws/config") from error
    except StreamError:
        raise
    except (aws.BotoCoreError, ValueError, OSError) as error:
        if is_out_of_files(error):
            raise SourceError("too many open files", hint=OPEN_FILES_HINT, url=url) from error
        raise ConfigError(f"the S3 settings are not usable: {error}") from error
    try:
        _refuse_keys(api.meta.endpoint_url)
        return S3Client(api, region, _proxy(api.meta.endpoint_url, config), verify, stack)
    except ConfigError:
        await stack.aclose()
        raise


def _refuse_keys(endpoint_url: str | None) -> None:
    if "@" in (endpoint_url or ""):
        raise ConfigError(
            "the endpoint URL has a user name in it", hint="leave it out; keys are found as for the AWS CLI"
        )


def _proxy(endpoint_url: str, config: StreamConfig) -> Proxy | None:
    if config.transport == "sdk":
        return None  # the SDK finds its proxy itself, and speaks to more kinds
    found = proxy_url(endpoint_url)
    return proxy_for(found, "set transport=sdk") if found else None


async def find_credentials(session: AioSession, url: str | None) -> Any:
    """Let the session find its credentials, which it keeps; those of a role are only asked for when signing.

    Raises:
        CredentialsError: there are none, or they cannot be read.
    """
    try:
        found = await session.get_credentials()
    except (aws.ProfileNotFound, aws.ConfigParseError):
        raise
    except (ValueError, AttributeError, TypeError) as error:
        # Other things than the JSON expected. Not chained: what could not be parsed hangs on it.
        raise unreadable_credentials(ValueError(str(error)), url) from None
    except (aws.BotoCoreError, OSError) as error:
        raise unreadable_credentials(error, url) from error
    if found is None:
        raise no_credentials(url)
    return found


def _client_config(config: StreamConfig, location: S3Location, *, unsigned: bool) -> AioConfig:
    options: dict[str, Any] = {}
    if config.addressing_style != "auto":
        # Left out otherwise: naming it would override the profile's own `s3` section.
        options["s3"] = {"addressing_style": config.addressing_style}
    return AioConfig(
        signature_version=signature_version(location, anonymous=unsigned),
        connect_timeout=config.connect_timeout_seconds,
        read_timeout=config.idle_timeout_seconds,
        max_pool_connections=config.concurrency,
        # Retries are ours, with a deadline; botocore's give up on throttling within seconds.
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Newer SDK checksums break stores that are not AWS; https://github.com/boto/boto3/issues/4400
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="s3stream",
        **options,
    )


@contextlib.asynccontextmanager
async def translated(place: Place, *, anonymous: bool) -> AsyncIterator[None]:
    """Turn botocore's exceptions into ours, by type and code.

    Raises:
        TransientFailure, CredentialsExpired: for whoever retries.
        SourceError: refused for good.
    """
    try:
        yield
    except aws.ClientError as error:
        # Never chained: it quotes the store, and some stores quote the request, signature and all.
        metadata = error.response.get("ResponseMetadata", {})
        headers = metadata.get("HTTPHeaders", {})
        detail = error.response.get("Error", {})
        code = str(detail.get("Code", ""))
        status = int(metadata.get("HTTPStatusCode", 0))
        request_id = metadata.get("RequestId") or None
        if error.operation_name in IDENTITY_OPERATIONS:
            raise refused_identity(place, error.operation_name, status, detail, request_id) from None
        if error.operation_name == "CreateSession":
            place = replace(place, action="s3express:CreateSession")
        raise classify(
            place,
            status,
            code="" if code.isdigit() else code,  # HEAD has no body, so botocore repeats the status
            message=str(detail.get("Message", "")) if not code.isdigit() else "",
            request_id=request_id,
            region=headers.get("x-amz-bucket-region") or str(detail.get("Region", "")),
            retry_after=retry_after(headers),
            anonymous=anonymous,
        ) from None
    except aws.NoCredentialsError as error:
        raise no_credentials(place.url) from error
    except CREDENTIAL_ERRORS as error:
        raise unreadable_credentials(error, place.url) from error
    except json.JSONDecodeError as error:  # S3 speaks XML, so this is a source of credentials; see above
        raise unreadable_credentials(error, place.url) from None
    except aws.ParamValidationError as error:
        if any(name in str(error) for name in ("WebIdentityToken", "RoleArn", "RoleSessionName")):
            raise unreadable_credentials(error, place.url) from error
        raise ConfigError(f"{place.url} is not a valid S3 location: {error}") from error
    except aws.SSLError as error:
        cause = error.kwargs.get("error")
        why, hint = explain_tls_failure(getattr(cause, "certificate_error", cause), "the endpoint")
        raise SourceError(why, hint=hint, url=place.url) from error
    except (aws.HTTPClientError, aws.ConnectionError) as error:
        # Never chained: what aiohttp says of a proxy holds its password.
        raise _no_answer(place, error) from None
    except (aiohttp.ClientError, TimeoutError) as error:
        # aiobotocore reads what GetObject is refused with outside of what translates aiohttp's exceptions.
        raise unavailable(place, f"the refusal broke off: {type(error).__name__}") from None
    except aws.BotoCoreError as error:
        raise SourceError(f"the request could not be made: {_without_query(str(error))}", url=place.url) from error
    except (ResponseParserError, KeyError) as error:
        raise BadResponseError("the store did not answer in S3's form", hint=endpoint_hint(), url=place.url) from error
    except RuntimeError as error:
        if "credentials" not in str(error):  # botocore has no type of its own for "renewed, but still expired"
            raise
        raise CredentialsError(
            "the credentials have expired, and so have those that replaced them",
            hint="log in again, and check this machine's clock",
            url=place.url,
        ) from error
    except OSError as error:
        if isinstance(error, StreamError):
            raise
        raise unreadable_credentials(error, place.url) from error  # a token file, or a credential_process


def _no_answer(place: Place, error: aws.BotoCoreError) -> TransientFailure:
    cause = error.kwargs.get("error")
    cause = getattr(cause, "os_error", cause)  # aiohttp wraps what the system said
    why = re.sub(r"//\S*@", "//", _without_query(str(error)))
    hint = "check the endpoint, firewall and proxy settings"
    if isinstance(cause, OSError) and cause.strerror and cause.strerror not in why:
        why = f"{why}: {cause.strerror}"
    return unavailable(place, why, hint=OPEN_FILES_HINT if is_out_of_files(cause) else hint)


def _without_query(text: str) -> str:
    """Cut query strings, which carry signatures, out of botocore's messages."""
    return re.sub(r"\?[^\s\"']*", "", text)
