"""What ranks say to each other when they meet."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from streamer.errors import LoadError, StreamError

__all__ = ["Message", "Stage", "first_error", "with_rank"]


class Stage(IntEnum):
    """How far a rank is."""

    ASKING = 0
    """There may be more to ask for before the code that waits can go on."""
    WAITING = 1
    """What was asked for must be there before the code can go on."""
    OVER = 2
    """There will be nothing more in this load."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank says when all meet.

    Attributes:
        purpose: must be the same on all.
        host: identity of its machine.
        files: digest of the files that it numbers.
        spans: that it needs, packed.
        fetched_bytes: since the load began.
        is_flying: what it launched may still be under way.
        error: why it gives up.
        value: what it has for the others.
    """

    purpose: str
    stage: Stage
    host: str
    files: bytes = b""
    spans: bytes = b""
    fetched_bytes: int = 0
    is_flying: bool = False
    error: StreamError | None = None
    value: Any = None


def first_error(answers: Sequence[Message]) -> StreamError | None:
    """Return the lowest rank's own error; others may only pass on what they heard from it."""
    errors = [(answer.error, rank) for rank, answer in enumerate(answers) if answer.error is not None]
    own = (error for error, rank in errors if error.rank == rank)
    return next(own, errors[0][0] if errors else None)


def with_rank(error: BaseException, rank: int) -> StreamError:
    """Return what other ranks shall raise."""
    if not isinstance(error, StreamError):
        return with_rank(LoadError(f"{type(error).__name__}: {error}", hint="see the log of that rank"), rank)
    if error.rank is not None:
        return error
    said = copy.copy(error)
    said.__cause__ = said.__context__ = said.__traceback__ = None
    said.rank = rank
    said.message = f"on rank {rank}, {error.message}"
    return said
