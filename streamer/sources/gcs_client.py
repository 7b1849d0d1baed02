"""The control plane of Google Cloud Storage: small requests to its JSON API, by aiohttp.

Endpoint, identity, authorities and proxy are resolved here, once, for bodies too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import aiohttp
from yarl import URL

from streamer.config import StreamConfig
from streamer.errors import BadResponseError, ConfigError, SourceError
from streamer.sources.gcs_errors import classify_refusal
from streamer.sources.gcs_identity import Anonymous, GoogleIdentity, Identity
from streamer.sources.network import proxy_url, resolve_verify, ssl_context_for
from streamer.transport.failures import OPEN_FILES_HINT, CredentialsExpired, Place, is_out_of_files, unavailable
from streamer.transport.lanes import Lanes, open_lanes
from streamer.transport.pool import Proxy, proxy_for
from streamer.transport.retry import Attempts, RetryPolicy, call_with_retries

__all__ = ["GcsClient"]

_ENDPOINT = "https://storage.googleapis.com"
#: A page of a thousand names of a thousand bytes each is 1.2 MB.
_MOST_ANSWER_BYTES = 32 << 20


class GcsClient:
    """Asks the JSON API.

    Args:
        url: of the bucket, for messages.

    Raises:
        ConfigError: an endpoint, bundle or proxy that cannot be used.
    """

    def __init__(self, config: StreamConfig, url: str) -> None:
        self._config = config
        self._policy = RetryPolicy.from_config(config)
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        self.endpoint = _endpoint(config.endpoint_url, emulator)
        bundle = os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE")
        verify = resolve_verify(config, bundle)
        is_tls = self.endpoint.startswith("https:")
        self._ssl: ssl.SSLContext | None = ssl_context_for(verify) if is_tls else None
        self._proxy = proxy_url(self.endpoint)
        self.proxy: Proxy | None = (
            proxy_for(self._proxy, "name a proxy that is spoken to by HTTP") if self._proxy else None
        )
        is_anonymous = config.anonymous or bool(emulator and not config.endpoint_url)
        self.identity: Identity = Anonymous() if is_anonymous else GoogleIdentity(config, url, verify)
        if not is_anonymous and not is_tls and not _is_loopback(self.endpoint):
            raise ConfigError(
                f"{url}: tokens are not sent to {self.endpoint} unencrypted", hint="use https, or set anonymous=true"
            )
        self._session: aiohttp.ClientSession | None = None
        self._payer: str | None = None

    def open_lanes(self) -> Lanes:
        """Return what receives bodies."""
        return open_lanes(self._config, self._ssl)

    async def payer(self) -> Mapping[str, str]:
        """Return the parameters that say who pays, if the reader does."""
        if not self._config.requester_pays:
            return {}
        if self._payer is None:
            self._payer = await self.identity.project()
        return {"userProject": self._payer}

    async def get(self, place: Place, path: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Return the JSON object at `path`, under the retry policy; a token that is refused is renewed once.

        Raises:
            SourceError: see `streamer.errors`.
        """
        limit = self._config.retry_deadline_seconds
        refused: Mapping[str, str] | None = None

        async def attempt(_: Attempts) -> dict[str, Any]:
            nonlocal refused
            while True:
                headers = await self.identity.headers(refused)
                url = f"{self.endpoint}{path}?{urlencode({**parameters, **await self.payer()})}"
                try:
                    async with asyncio.timeout(limit):
                        return await self._ask(place, url, headers)
                except TimeoutError:
                    raise unavailable(place, f"the answer was not complete within {limit:g} s") from None
                except CredentialsExpired as expired:
                    if refused is not None:
                        raise expired.final from None
                    refused = headers

        return await call_with_retries(attempt, self._policy)

    async def _ask(self, place: Place, url: str, headers: Mapping[str, str]) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(
                    total=None,
                    sock_connect=self._config.connect_timeout_seconds,
                    sock_read=self._config.idle_timeout_seconds,
                ),
                headers={"User-Agent": "s3stream"},
            )
        try:
            async with self._session.get(
                URL(url, encoded=True),  # it would undo some of the escapes otherwise
                headers=headers,
                proxy=self._proxy,
                ssl=self._ssl if self._ssl is not None else True,
                allow_redirects=False,
            ) as response:
                body = await response.content.read(_MOST_ANSWER_BYTES + 1)
                while len(body) <= _MOST_ANSWER_BYTES and (more := await response.content.read(_MOST_ANSWER_BYTES)):
                    body += more
                status = response.status
                answered = {name.lower(): value for name, value in response.headers.items()}
        except aiohttp.ClientConnectorCertificateError:
            raise SourceError(
                "the certificate of the endpoint is not trusted",
                hint="name its authority with ca_bundle or AWS_CA_BUNDLE",
                url=place.url,
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._no_answer(place, error) from None  # what aiohttp says of a proxy holds its password
        if status != 200:
            raise classify_refusal(place, status, answered, body, anonymous=self.identity.is_anonymous)
        return _parse(place, body)

    def _no_answer(self, place: Place, error: Exception) -> Exception:
        cause = getattr(error, "os_error", error)
        why = (isinstance(cause, OSError) and cause.strerror) or type(error).__name__
        via = f" through the proxy {self.proxy.host}:{self.proxy.port}" if self.proxy else ""
        hint = OPEN_FILES_HINT if is_out_of_files(cause) else "check the endpoint, firewall and proxy settings"
        return unavailable(place, f"no answer from {self.endpoint}{via}: {why}", hint=hint)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        self.identity.close()


def _parse(place: Place, body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise BadResponseError(
            "the store did not answer in the form of GCS's JSON API",
            hint="check endpoint_url and STORAGE_EMULATOR_HOST",
            url=place.url,
        )
    return document


def _endpoint(option: str | None, emulator: str | None) -> str:
    """Return scheme and authority, without a slash at the end.

    Raises:
        ConfigError: something else than that.
    """
    given = option or emulator or _ENDPOINT
    where = "endpoint_url" if option else "STORAGE_EMULATOR_HOST"
    if not option and "://" not in given:
        given = f"http://{given}"  # as Google's own clients read the variable
    parts = urlsplit(given)
    if "@" in given:
        raise ConfigError(f"{where} has a user name in it", hint="leave it out")
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"{where} is {given!r}, which is no URL of a server", hint="write https://host:port")
    return given.rstrip("/")


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
