"""Which endpoint, region, addressing, proxy and authorities a load would use, and what decided that.

The values are those of the client that a load opens. What decided them is looked up in the order in which botocore
does (https://docs.aws.amazon.com/sdkref/latest/guide/settings-reference.html).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError
from botocore.utils import get_environ_proxies

from streamer.config import ENVIRONMENT_PREFIX, StreamConfig
from streamer.doctor.checks import Finding
from streamer.errors import ConfigError
from streamer.sources.network import ssl_context_for
from streamer.sources.s3_client import DEFAULT_REGION, S3Client, open_s3_client, translated
from streamer.sources.s3_identity import endpoint_hint
from streamer.sources.s3_url import S3Location
from streamer.transport.failures import Place
from streamer.transport.pool import Origin, Proxy, parse_origin, proxy_for

__all__ = ["Settings", "option_name"]


def option_name(name: str, value: object) -> str:
    """Say where an option of ours comes from."""
    variable = ENVIRONMENT_PREFIX + name.upper()
    return variable if os.environ.get(variable) == value else f"the option {name}"


class Settings:
    """Of one S3 location; each method is a check.

    Attributes:
        client: unsigned, open after `endpoint`; whoever opened it closes it with `close`.
    """

    def __init__(self, config: StreamConfig, location: S3Location) -> None:
        self.config = config
        self.location = location
        self._client: S3Client | None = None
        self._origin: Origin | None = None
        self.target = ""
        """Of an unsigned listing of at most one object, relative to the origin."""
        self.only_sdk_reaches = False
        """There is a proxy that `Origin` has no form for; known after `proxy`."""
        self._session: AioSession | None = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.stack.aclose()

    @property
    def client(self) -> S3Client:
        assert self._client is not None, "checked by `endpoint`"
        return self._client

    @property
    def origin(self) -> Origin:
        """Where requests for the bucket go, through which proxy."""
        assert self._origin is not None, "checked by `endpoint`"
        return self._origin

    @property
    def is_custom(self) -> bool:
        """Whether the endpoint is somebody else's than AWS's choice."""
        return self._endpoint_origin()[1]

    @property
    def is_path_style(self) -> bool:
        return self.target.partition("?")[0].rstrip("/").endswith(f"/{self.location.bucket}")

    @property
    def advice(self) -> str | None:
        """What else to try where a bucket is said not to be there."""
        if self.is_path_style or not self.is_custom:
            return None
        return "if it is there, set addressing_style=path: many stores know no buckets by the host's name"

    # -- the checks ------------------------------------------------------------------------------------

    async def profile(self) -> Finding:
        """Whether the shared configuration can be read and has the profile that is asked for."""
        session = AioSession(profile=self.config.profile)
        try:
            name = session.get_config_variable("profile")
            known = session.available_profiles
            session.get_scoped_config()
        except BotoCoreError as error:
            raise ConfigError(
                f"the AWS configuration cannot be used: {error}",
                hint="correct AWS_PROFILE or the option profile, and see ~/.aws/config",
            ) from error
        self._session = session
        if name is None:
            return Finding(f"none asked for; {'default is used' if 'default' in known else 'there is no default'}")
        given = option_name("profile", name) if self.config.profile else "AWS_DEFAULT_PROFILE or AWS_PROFILE"
        if not self.config.profile and os.environ.get("AWS_ACCESS_KEY_ID"):
            return Finding(
                f"{name}, from {given}",
                "the keys in AWS_ACCESS_KEY_ID win over this profile's; unset them, or set the option profile",
            )
        return Finding(f"{name}, from {given}")

    async def endpoint(self) -> Finding:
        """Opens the client, on which the other settings are looked up."""
        decided, _ = self._endpoint_origin()
        # A bundle or proxy that cannot be used is the matter of other checks.
        config = dataclasses.replace(self.config, ca_bundle=None, tls_verify=False, transport="sdk")
        try:
            self._client = await open_s3_client(config, self.location, unsigned=True)
        except ConfigError as error:
            raise ConfigError(
                f"{error.message}, with the endpoint from {decided}",
                hint=error.hint or "write http://host:port or https://host in endpoint_url",
            ) from error
        async with translated(Place(self.location.url), anonymous=True):
            url = await self._client.api.generate_presigned_url(
                "list_objects_v2",
                Params={"Bucket": self.location.bucket, "Prefix": self.location.prefix, "MaxKeys": 1},
            )
        self._origin, self.target = parse_origin(url)
        shown = f"{self._client.api.meta.endpoint_url}, from {decided}"
        return Finding(shown, endpoint_hint() if decided == "AWS_ENDPOINT_URL" else None)

    async def region(self) -> Finding:
        """A region that nobody chose is what most often is wrong."""
        region = self.client.region
        if self.config.region:
            return Finding(f"{region}, from {option_name('region', region)}")
        if os.environ.get("AWS_DEFAULT_REGION"):
            return Finding(f"{region}, from AWS_DEFAULT_REGION")
        if self._scoped().get("region"):
            return Finding(f"{region}, from {self._profile_name()}")
        ignored = os.environ.get("AWS_REGION")
        if ignored and ignored != region:
            return Finding(
                f"{region}, by default",
                f"AWS_REGION={ignored} is not read; set AWS_DEFAULT_REGION or the option region",
            )
        if region != DEFAULT_REGION:
            return Finding(f"{region}, as botocore finds it")
        return Finding(f"{region}, by default; where AWS says that the bucket is elsewhere, requests go there")

    async def addressing(self) -> Finding:
        style = "path style" if self.is_path_style else "virtual host"
        where = f"{style}: {self.origin.scheme}://{self.origin.authority}{self.target.partition('?')[0]}"
        if self.config.addressing_style != "auto":
            return Finding(f"{where}, from {option_name('addressing_style', self.config.addressing_style)}")
        section = self._scoped().get("s3")
        if isinstance(section, Mapping) and section.get("addressing_style", "auto") != "auto":
            return Finding(f"{where}, from the s3 section of {self._profile_name()}")
        return Finding(f"{where}, as botocore chooses for {'other stores' if self.is_custom else 'AWS'}")

    async def proxy(self) -> Finding:
        """Which one, by the variables that botocore and we go by; its password is not shown."""
        url = f"{self.origin.scheme}://{self.origin.authority}"
        found = get_environ_proxies(url).get(self.origin.scheme)
        variable = self.proxy_variable
        if not found:
            return Finding(f"none; {variable} is set, but NO_PROXY exempts the host" if variable else "none")
        if self.config.transport == "sdk":
            parts = urlsplit(found if "://" in found else f"http://{found}")
            if parts.scheme != "http":
                self.only_sdk_reaches = True
                return Finding(
                    f"{parts.scheme}://{parts.hostname}:{parts.port}, from {variable}; only the SDK speaks it"
                )
        proxy = proxy_for(found, "set transport=sdk")
        self._origin = dataclasses.replace(self.origin, proxy=proxy)
        return Finding(f"{_name_of(proxy)}, from {variable}")

    async def ca_bundle(self) -> Finding:
        if self.origin.scheme == "http":
            return Finding(
                "not used: the endpoint speaks plain HTTP",
                None
                if self._is_local()
                else "anybody on the way can read and change weights; use https:// if there is one",
            )
        if not self.config.tls_verify:
            return Finding(
                "no certificate is checked, because tls_verify is off",
                "weights can be replaced on the way; name the store's authority with ca_bundle instead",
            )
        bundle, decided = self._bundle()
        ssl_context_for(bundle or True)
        return Finding(f"{bundle}, from {decided}" if bundle else "the authorities that botocore comes with")

    # -- what decided ----------------------------------------------------------------------------------

    @property
    def proxy_variable(self) -> str | None:
        """The variable that names a proxy for the scheme in use, whether or not NO_PROXY exempts the host."""
        names = (f"{self.origin.scheme}_proxy", f"{self.origin.scheme}_proxy".upper())
        return next((name for name in names if os.environ.get(name)), None)

    @property
    def verify(self) -> str | bool:
        """As `S3Client.verify`; the bundle may be missing or broken."""
        return (self._bundle()[0] or True) if self.config.tls_verify else False

    def _bundle(self) -> tuple[str | None, str]:
        if self.config.ca_bundle:
            return self.config.ca_bundle, option_name("ca_bundle", self.config.ca_bundle)
        if os.environ.get("AWS_CA_BUNDLE"):
            return os.environ["AWS_CA_BUNDLE"], "AWS_CA_BUNDLE"
        return self._scoped().get("ca_bundle"), f"ca_bundle of {self._profile_name()}"

    def _endpoint_origin(self) -> tuple[str, bool]:
        """What decided the endpoint, and whether it is another than AWS's own."""
        if self.config.endpoint_url:
            return option_name("endpoint_url", self.config.endpoint_url), True
        if self._session is not None and self._session.get_config_variable("ignore_configured_endpoint_urls"):
            return "AWS's rules, because AWS_IGNORE_CONFIGURED_ENDPOINT_URLS is set", False
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if os.environ.get(variable):
                return variable, True
        scoped = self._scoped()
        services = self._session.full_config.get("services", {}) if self._session is not None else {}
        section = services.get(scoped.get("services"), {}).get("s3", {})
        if isinstance(section, Mapping) and section.get("endpoint_url"):
            return f"the services section {scoped['services']} of {self._profile_name()}", True
        if scoped.get("endpoint_url"):
            return f"endpoint_url of {self._profile_name()}", True
        return "AWS's rules for the bucket and the region", False

    def _scoped(self) -> Mapping[str, Any]:
        return {} if self._session is None else self._session.get_scoped_config()

    def _profile_name(self) -> str:
        name = self._session.get_config_variable("profile") if self._session is not None else None
        return f"the profile {name or 'default'}"

    def _is_local(self) -> bool:
        return self.origin.host in ("localhost", "::1") or self.origin.host.startswith("127.")


def _name_of(proxy: Proxy) -> str:
    return f"http://{proxy.host}:{proxy.port}{' with a password' if proxy.authorization else ''}"
