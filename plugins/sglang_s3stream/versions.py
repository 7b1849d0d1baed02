"""Which versions of SGLang this plugin is tested with."""

from __future__ import annotations

import logging
import re

__all__ = ["TESTED", "installed_version", "warn_if_untested"]

logger = logging.getLogger("sglang.s3stream")

#: ``tests/sglang`` runs on this one.
TESTED = (0, 5, 23)


def installed_version() -> str:
    """Return SGLang's own word for its version."""
    import sglang

    return str(getattr(sglang, "__version__", "?"))


def warn_if_untested() -> None:
    """Say so when the installed SGLang is another; what it lacks is then found out when it is used."""
    text = installed_version()
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None or tuple(map(int, match.groups())) != TESTED:
        tested = ".".join(map(str, TESTED))
        logger.warning("s3stream is tested with SGLang %s and this is %s; it will be tried nevertheless", tested, text)
