"""Which versions of vLLM this plugin is tested with."""

from __future__ import annotations

import logging
import re
from typing import Any

from streamer.errors import MissingDependencyError

__all__ = ["TESTED", "require", "warn_if_untested"]

logger = logging.getLogger("vllm.s3stream")

#: Oldest and newest, both tested; ``tests/vllm`` runs on these two.
TESTED = ((0, 28), (0, 32))


def require(owner: Any, *names: str) -> None:
    """Make sure that what we build on is there, before a load begins that could not end.

    Raises:
        MissingDependencyError: this vLLM lacks some of it.
    """
    lacking = [name for name in names if not hasattr(owner, name)]
    if lacking:
        import vllm

        raise MissingDependencyError(
            f"{owner.__name__} of vLLM {getattr(vllm, '__version__', '?')} has no {', '.join(lacking)}",
            hint=f"s3stream is tested with vLLM {_range()}; upgrade s3stream, or use one of these",
        )


def _range() -> str:
    return " to ".join(".".join(map(str, version)) for version in TESTED)


def warn_if_untested() -> None:
    """Say so when the installed vLLM is none of those; what it lacks is then found out when it is used."""
    import vllm

    text = str(getattr(vllm, "__version__", ""))
    match = re.match(r"(\d+)\.(\d+)", text)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or not TESTED[0] <= found <= TESTED[1]:
        logger.warning("s3stream is tested with vLLM %s and this is %s; it will be tried nevertheless", _range(), text)
