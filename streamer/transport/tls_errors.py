"""What a failed TLS handshake means, and what to do about it."""

from __future__ import annotations

import ssl

__all__ = ["explain_tls_failure"]

_BUNDLE = "name its authority with ca_bundle or AWS_CA_BUNDLE"
#: By the number of OpenSSL's verdict; https://docs.openssl.org/master/man3/X509_STORE_CTX_get_error/
_VERDICTS = {
    9: ("is not valid yet", "set this machine's clock, or wait"),
    10: ("has expired", "have the owner of the store renew it, or set this machine's clock"),
    18: ("is not trusted: it is signed by itself", _BUNDLE),
    19: ("is not trusted: its authority is unknown here", _BUNDLE),
    20: ("is not trusted: its authority is unknown here", _BUNDLE),
    21: ("is not trusted: its authority is unknown here", _BUNDLE),
    62: ("is for another host", "write the host that the certificate names in endpoint_url"),
    64: ("is for another host", "write the host that the certificate names in endpoint_url"),
}


def explain_tls_failure(error: BaseException | None, where: str) -> tuple[str, str]:
    """Return what happened with `where`, as the end of a sentence about it, and what to try."""
    if isinstance(error, ssl.SSLCertVerificationError):
        what, hint = _VERDICTS.get(error.verify_code, (f"is not trusted: {error.verify_message}", _BUNDLE))
        detail = f" ({error.verify_message})" if error.verify_code in _VERDICTS and error.verify_message else ""
        return f"the certificate of {where} {what}{detail}", hint
    reason = getattr(error, "reason", None) or (str(error) if error is not None else "no reason given")
    return (
        f"no TLS with {where}: {reason}",
        "if the store speaks plain HTTP write http:// in endpoint_url; else check what stands in between",
    )
