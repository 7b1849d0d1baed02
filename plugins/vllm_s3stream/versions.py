"""Which versions of vLLM this plugin is tested with."""

from __future__ import annotations

import logging
import re

__all__ = ["TESTED", "warn_if_untested"]

logger = logging.getLogger("vllm.s3stream")

#: Oldest and newest, both tested; ``tests/vllm`` runs on these two.
TESTED = ((0, 28), (0, 32))


def warn_if_untested() -> None:
    """Say so when the installed vLLM is none of those; what it lacks is then found out when it is used."""
    import vllm

    text = str(getattr(vllm, "__version__", ""))
    match = re.match(r"(\d+)\.(\d+)", text)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or not TESTED[0] <= found <= TESTED[1]:
        oldest, newest = (".".join(map(str, version)) for version in TESTED)
        logger.warning(
            "s3stream is tested with vLLM %s to %s and this is %s; it will be tried nevertheless", oldest, newest, text
        )
