"""The S3 control plane: one client configuration, as botocore resolves it, for every kind of request."""

from __future__ import annotations

import contextlib
import re
import ssl
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.exceptions as aws
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.httpsession import get_cert_path
from botocore.parsers import ResponseParserError
from botocore.utils import get_environ_proxies

from streamer.config import StreamConfig
from streamer.errors import BadResponseError, ConfigError, CredentialsError, SourceError
from streamer.transport.failures import Place, classify, unavailable
from streamer.transport.pool import Proxy, proxy_for

__all__ = ["S3Client", "open_s3_client", "ssl_context_for", "translated"]

_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class S3Client:
    """An open client, with what the data plane must share with it."""

    api: Any
    region: str
    proxy: Proxy | None
    verify: str | bool
    stack: contextlib.AsyncExitStack


async def open_s3_client(config: StreamConfig, *, region: str | None = None) -> S3Client:
    """Create a session and a client; credentials are looked up, S3 is not contacted.

    Args:
        region: overrides what the configuration and botocore say, after the store has told us better.

    Raises:
        ConfigError: a profile, region or endpoint that botocore refuses.
        CredentialsError: credentials are only half there, or their provider failed.
    """
    session = AioSession(profile=config.profile)
    try:
        region = region or config.region or session.get_config_variable("region") or _DEFAULT_REGION
        verify = _resolve_verify(config, session)
        stack = contextlib.AsyncExitStack()
        api = await stack.enter_async_context(
            session.create_client(
                "s3",
                region_name=region,
                endpoint_url=config.endpoint_url,
                verify=verify,
                config=_client_config(config),
            )
        )
    except aws.ProfileNotFound as error:
        raise ConfigError(f"there is no profile {error.kwargs.get('profile')!r}", hint="see ~/.aws/config") from error
    except (aws.PartialCredentialsError, aws.CredentialRetrievalError, aws.TokenRetrievalError) as error:
        raise CredentialsError(f"the credentials could not be read: {error}") from error
    except (aws.BotoCoreError, ValueError, OSError) as error:
        raise ConfigError(f"the S3 settings are not usable: {error}") from error
    endpoint = api.meta.endpoint_url
    proxy = get_environ_proxies(endpoint).get(endpoint.partition("://")[0])
    return S3Client(api, region, proxy_for(proxy) if proxy else None, verify, stack)


def _client_config(config: StreamConfig) -> AioConfig:
    options: dict[str, Any] = {}
    if config.addressing_style != "auto":
        # Left out otherwise: naming it would override the profile's own `s3` section.
        options["s3"] = {"addressing_style": config.addressing_style}
    return AioConfig(
        # us-east-1 with a custom endpoint would otherwise presign with SigV2.
        signature_version=UNSIGNED if config.anonymous else "s3v4",
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


def _resolve_verify(config: StreamConfig, session: AioSession) -> str | bool:
    if not config.tls_verify:
        warnings.warn(
            "tls_verify is off: any certificate is accepted, so weights can be replaced on the way", stacklevel=2
        )
        return False
    bundle = config.ca_bundle or session.get_config_variable("ca_bundle")
    if bundle and not Path(bundle).is_file():
        raise ConfigError(f"the CA bundle {bundle} does not exist", hint="see ca_bundle and AWS_CA_BUNDLE")
    return str(bundle) if bundle else True


def ssl_context_for(verify: str | bool) -> ssl.SSLContext:
    """Build the context that botocore's own connections would use.

    Raises:
        ConfigError: the bundle is missing or is not a PEM file.
    """
    if verify is False:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    path = verify if isinstance(verify, str) else get_cert_path(True)
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the CA bundle {path} cannot be used: {reason}", hint="give a PEM file") from error


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
        metadata = error.response.get("ResponseMetadata", {})
        headers = metadata.get("HTTPHeaders", {})
        detail = error.response.get("Error", {})
        code = str(detail.get("Code", ""))
        raise classify(
            place,
            int(metadata.get("HTTPStatusCode", 0)),
            code="" if code.isdigit() else code,  # HEAD has no body, so botocore repeats the status
            message=str(detail.get("Message", "")) if not code.isdigit() else "",
            request_id=metadata.get("RequestId") or None,
            region=headers.get("x-amz-bucket-region") or str(detail.get("Region", "")),
            anonymous=anonymous,
        ) from error
    except (aws.NoCredentialsError, aws.PartialCredentialsError) as error:
        raise CredentialsError(
            "no credentials were found",
            hint="configure them as for the AWS CLI, or set anonymous=true for a public bucket",
            url=place.url,
        ) from error
    except (aws.CredentialRetrievalError, aws.TokenRetrievalError, aws.SSOError) as error:
        raise CredentialsError(f"the credentials could not be read: {error}", url=place.url) from error
    except aws.ParamValidationError as error:
        raise ConfigError(f"{place.url} is not a valid S3 location: {error}") from error
    except aws.SSLError as error:
        raise SourceError(
            "the certificate of the endpoint is not trusted",
            hint="name its authority with ca_bundle or AWS_CA_BUNDLE",
            url=place.url,
        ) from error
    except (aws.HTTPClientError, aws.ConnectionError) as error:
        raise unavailable(
            place, _without_query(str(error)), hint="check the endpoint, firewall and proxy settings"
        ) from error
    except ResponseParserError as error:
        raise BadResponseError("the store did not answer in S3's form", url=place.url) from error


def _without_query(text: str) -> str:
    """Cut query strings, which carry signatures, out of botocore's messages."""
    return re.sub(r"\?[^\s\"']*", "", text)
