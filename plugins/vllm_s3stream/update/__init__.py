"""Live weight updates: ``vllm serve ... --worker-extension-cls vllm_s3stream.update.Updates``."""

from __future__ import annotations

from typing import Any

__all__ = ["Updates"]


class Updates:
    """What ``collective_rpc`` can ask a worker for. vLLM makes it a base class of its worker.

    Neither method raises: vLLM would leave the answers of the other ranks in their queues, for the next call to find.
    """

    def s3stream_update(self, url: str, version: str | None = None) -> dict[str, Any]:
        """Replace the model's weights by those at `url`, together with all other ranks.

        Args:
            version: what to call them; the URL if None.

        Returns:
            ``rank``; ``updated``; ``url`` and ``version`` of what this rank has now; ``seconds``; ``bytes`` that it
            received; ``error``, a message or None, and ``error_type``, a class of `streamer.errors`; ``lost``, true
            when the weights are a mixture and the engine is going to end.
        """
        from vllm_s3stream.update.worker import update

        return update(self, url, version)

    def s3stream_version(self) -> dict[str, Any]:
        """Return ``rank``, and ``url`` and ``version`` of the weights that it has, or ``error`` and ``error_type``."""
        from vllm_s3stream.update.worker import version

        return version(self)
