"""Ranks agree whether they go on."""

from __future__ import annotations

from streamer.config import StreamConfig
from streamer.errors import LoadError
from streamer.share.group import Group
from streamer.share.messages import Message, Stage, first_error, with_rank

__all__ = ["vote"]


def vote(
    group: Group | None, config: StreamConfig, purpose: str, *, error: BaseException | None = None, ballot: bytes = b""
) -> None:
    """Return on all ranks, or raise on all of them. A collective.

    Args:
        group: None for a rank that is alone.
        purpose: what is voted on, for messages.
        error: why this rank does not go on.
        ballot: what must be equal on all ranks that do.

    Raises:
        StreamError: that of the first rank that had one, with its rank.
        LoadError: a rank did not come in time, is gone, votes on something else, or has another ballot.
    """
    if group is None or group.size == 1:
        if error is not None:
            raise error
        return
    said = None if error is None else with_rank(error, group.rank)
    message = Message(purpose, Stage.ASKING, group.host, files=ballot, error=said)
    answers = group.gather(message, timeout_seconds=config.share_timeout_seconds)
    chosen = first_error(answers)
    if chosen is not None:
        raise chosen from error
    purposes = {answer.purpose for answer in answers}
    if len(purposes) > 1:
        raise LoadError(f"the ranks vote on different things: {', '.join(sorted(purposes))}")
    if len({answer.files for answer in answers}) > 1:
        raise LoadError(
            f"the ranks do not see the same objects: {purpose}",
            hint="do not write to a checkpoint while it is being loaded; try again when it is complete",
        )
