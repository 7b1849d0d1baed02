"""What every request to a store must go by: which authorities to trust, and through which proxy."""

from __future__ import annotations

import ssl
import warnings
from pathlib import Path
from urllib.parse import urlsplit

from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from streamer.config import StreamConfig
from streamer.errors import ConfigError

__all__ = ["proxy_url", "resolve_verify", "ssl_context_for"]


def proxy_url(url: str) -> str | None:
    """Return the proxy that the environment names for `url`, as botocore and requests read it."""
    found = get_environ_proxies(url).get(urlsplit(url).scheme)
    return str(found) if found else None


def resolve_verify(config: StreamConfig, configured: str | None) -> str | bool:
    """Return the file of trusted authorities, True for the usual ones, or False to trust anybody.

    Args:
        configured: the file that the store's own configuration names.

    Raises:
        ConfigError: the file does not exist.
    """
    if not config.tls_verify:
        warnings.warn(
            "tls_verify is off: any certificate is accepted, so weights can be replaced on the way", stacklevel=2
        )
        return False
    bundle = config.ca_bundle or configured
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
