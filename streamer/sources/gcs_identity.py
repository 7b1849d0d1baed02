"""Who asks Google Cloud Storage: nobody, or whom Google's own library finds.

`google.auth.default` knows service accounts, users logged in with gcloud, workload identity federation, impersonation
and the metadata server, which is also GKE's workload identity. Its requests block, so they run in threads.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from streamer.config import StreamConfig
from streamer.errors import ConfigError, CredentialsError, MissingDependencyError
from streamer.sources.network import proxy_url
from streamer.transport.failures import Place, hide_secrets, unavailable

__all__ = ["Anonymous", "GoogleIdentity", "Identity"]

logger = logging.getLogger("streamer")

T = TypeVar("T")

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
#: The metadata server is on the machine itself; off Google's cloud nobody answers, and google-auth tries three times.
_METADATA_CONNECT_SECONDS = 0.5
_TRY_LATER = frozenset({408, 429, 500, 502, 503, 504})
_METADATA_NAMES = ("metadata.google.internal", "metadata.google.internal.")
_NOT_FOUND_HINT = (
    "set GOOGLE_APPLICATION_CREDENTIALS, log in with `gcloud auth application-default login`, give the machine or pod "
    "a service account, or set anonymous=true for a public bucket"
)


class Identity(Protocol):
    """What requests are made as."""

    @property
    def is_anonymous(self) -> bool:
        """Whether requests carry no credentials."""

    async def headers(self, refused: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """Return the headers that say who asks.

        Args:
            refused: these, which the store refused. A new token is asked for, once for all who were refused.

        Raises:
            CredentialsError: there are none, or they are not accepted where tokens are given.
            TransientFailure: tokens cannot be had at present.
            MissingDependencyError: google-auth is not installed.
        """

    async def project(self) -> str:
        """Return the project that pays.

        Raises:
            ConfigError: none is known.
        """

    def close(self) -> None:
        """Close what tokens are asked for with. Idempotent."""


class Anonymous:
    """Nobody."""

    is_anonymous = True

    async def headers(self, refused: Mapping[str, str] | None = None) -> Mapping[str, str]:
        return {}

    async def project(self) -> str:
        return _named_project(None)

    def close(self) -> None:
        return None


class GoogleIdentity:
    """What google-auth finds in this environment.

    Args:
        url: of the bucket, for messages.
        verify: as for `requests`.
    """

    is_anonymous = False

    def __init__(self, config: StreamConfig, url: str, verify: str | bool) -> None:
        self._place = Place(url)
        self._timeout = config.idle_timeout_seconds
        self._verify = verify
        self._asking = asyncio.Lock()
        self._request: _BoundedRequest | None = None
        self._credentials: Any = None
        self._project: str | None = None

    async def headers(self, refused: Mapping[str, str] | None = None) -> Mapping[str, str]:
        if self._credentials is None or self._is_due(refused):
            async with self._asking:
                if self._credentials is None:
                    await self._ask(self._find)
                if self._is_due(refused):
                    await self._renew(refused)
        headers: dict[str, str] = {}
        self._credentials.apply(headers)
        return headers

    async def project(self) -> str:
        await self.headers()
        return _named_project(self._credentials.quota_project_id or self._project)

    def close(self) -> None:
        if self._request is not None:
            self._request.close()

    def _is_due(self, refused: Mapping[str, str] | None) -> bool:
        from google.auth.credentials import TokenState

        if self._credentials.token_state is not TokenState.FRESH:
            return True
        headers: dict[str, str] = {}
        self._credentials.apply(headers)
        return refused is not None and refused.get("authorization") == headers.get("authorization")

    async def _renew(self, refused: Mapping[str, str] | None) -> None:
        from google.auth.credentials import TokenState

        try:
            await self._ask(lambda: self._credentials.refresh(self._request))
        except Exception as error:
            if refused is not None or self._credentials.token_state is not TokenState.STALE:
                raise
            # google-auth renews minutes before a token expires; until then the old one is good.
            logger.warning("%s: the token could not be renewed yet: %s", self._place.url, error)

    def _find(self) -> None:
        import google.auth
        from google.auth import credentials

        request: Any = _BoundedRequest(self._timeout, self._verify)
        self._request = request
        # Given the scope at once, it would ask the Resource Manager for the project of a federated identity, which
        # many networks do not let through and many identities may not ask.
        found, self._project = google.auth.default(request=request)
        # With a read-only scope a stolen token cannot write. Those of users have the scopes they logged in with.
        with_scopes: Any = credentials.with_scopes_if_required
        self._credentials = with_scopes(found, [_SCOPE])

    async def _ask(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; its exceptions become ours, and are never chained, for they may quote answers."""
        try:
            from google.auth import exceptions
        except ImportError as error:
            raise MissingDependencyError(
                f"{self._place.url} needs the package google-auth",
                hint="pip install 's3stream[gcs]', or set anonymous=true for a public bucket",
            ) from error
        if self._request is not None:
            self._request.is_passing = False
        try:
            return await asyncio.to_thread(work)
        except ImportError as error:
            raise MissingDependencyError(
                f"{self._place.url} needs a package that is not installed: {error.name}",
                hint="pip install 's3stream[gcs]'",
            ) from error
        except exceptions.DefaultCredentialsError as error:
            said = _said(error)
            if "not found. To set up" in said or "were not found" in said:
                said = "no credentials were found in GOOGLE_APPLICATION_CREDENTIALS, gcloud's or the metadata server"
            raise CredentialsError(said, hint=_NOT_FOUND_HINT, url=self._place.url) from None
        except exceptions.TransportError as error:
            raise unavailable(
                self._place, f"no token could be had: {_said(error)}", hint="check the firewall and proxy settings"
            ) from None
        except exceptions.GoogleAuthError as error:
            # What failed is not told by the class: the metadata server's silence is a RefreshError as a bad key is.
            if getattr(error, "retryable", False) or (self._request is not None and self._request.is_passing):
                raise unavailable(self._place, f"no token could be had: {_said(error)}") from None
            raise self._refused(_said(error)) from None
        except (ValueError, OSError) as error:  # of files, keys and programs that credentials are read from
            raise self._refused(_said(error)) from None

    def _refused(self, said: str) -> CredentialsError:
        return CredentialsError(
            f"the credentials give no token: {said}",
            hint="check the file, account or role that they name, or log in again",
            url=self._place.url,
        )


def _named_project(found: str | None) -> str:
    project = os.environ.get("GOOGLE_CLOUD_PROJECT") or found
    if not project:
        raise ConfigError(
            "requester_pays needs a project that pays, and none is known", hint="set GOOGLE_CLOUD_PROJECT to its id"
        )
    return project


def _said(error: Exception) -> str:
    """Return what an exception says, without what might be a password, a token or an answer's body."""
    text = str(error.args[0]) if error.args else type(error).__name__
    text = re.sub(r"//[^\s/@]*@", "//", re.sub(r"\?[^\s\"')]*", "", text))
    return hide_secrets(" ".join(text.split()))[:300]


class _BoundedRequest:
    """What google-auth makes requests with: its own adapter of `requests`, with our proxies, authorities and timeouts.

    Args:
        timeout: seconds that an answer may take, at most.
        verify: as for `requests`.

    Attributes:
        is_passing: the last request got no answer, or one that says to try later.
    """

    def __init__(self, timeout: float, verify: str | bool) -> None:
        import requests
        from google.auth.transport.requests import Request

        self.session = requests.Session()  # google-auth looks for it
        # Or it would prefer passwords from ~/.netrc to the token, and send what is for the metadata server to a proxy.
        self.session.trust_env = False
        self._request: Any = Request(self.session)
        self.is_passing = False
        self._timeout = timeout
        self._verify = verify

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Any:
        limit = self._timeout if timeout is None else min(timeout, self._timeout)
        is_near = _is_metadata(url)
        proxy = None if is_near else proxy_url(url)
        self.is_passing = True
        response = self._request(
            url,
            method,
            body,
            headers,
            timeout=(min(_METADATA_CONNECT_SECONDS, limit), limit) if is_near else limit,
            proxies={urlsplit(url).scheme: proxy} if proxy else {},
            verify=self._verify,
            **options,
        )
        self.is_passing = response.status in _TRY_LATER
        return response

    def close(self) -> None:
        self.session.close()


def _is_metadata(url: str) -> bool:
    """Whether `url` is on this machine's own network: it must never go through a proxy."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    named = {os.environ.get(name) for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")}
    try:
        return parts.netloc in named or host in _METADATA_NAMES or ipaddress.ip_address(host).is_link_local
    except ValueError:
        return False
