"""From an error to an exit code; the table in the README is checked against this one."""

from __future__ import annotations

from streamer.errors import (
    AccessDeniedError,
    CheckpointError,
    ConfigError,
    CredentialsError,
    DestinationError,
    LoadError,
    MissingDependencyError,
    NoSpaceError,
    NotFetchedError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceError,
    StreamError,
)

__all__ = ["EXIT_CODES", "FAILED", "exit_code"]

FAILED = 1

#: First match counts, so subclasses come before their bases.
EXIT_CODES: tuple[tuple[type[StreamError], int, str], ...] = (
    (ConfigError, 2, "an option, variable, URL or argument is wrong"),
    (CheckpointError, 3, "the checkpoint is wrong, incomplete or of a kind that cannot be streamed"),
    (ObjectNotFoundError, 4, "the bucket, prefix, object or file does not exist"),
    (CredentialsError, 5, "there are no credentials, or the store does not accept them"),
    (AccessDeniedError, 5, "the store denies access"),
    (ObjectChangedError, 7, "the checkpoint was replaced while it was read"),
    (NotFetchedError, 12, "the folder was fetched for some ranks, and does not hold what others need"),
    (SourceError, 6, "the store cannot be reached, keeps failing or answers wrongly"),
    (LoadError, 8, "the bytes arrived but the model would not be right"),
    (MissingDependencyError, 9, "an optional package is not installed"),
    (NoSpaceError, 11, "the folder to write to has too few bytes or inodes left"),
    (DestinationError, 10, "the folder to write to is read-only, denies access or refuses otherwise"),
)


def exit_code(error: StreamError) -> int:
    """Return the exit code for `error`."""
    return next((code for kind, code, _ in EXIT_CODES if isinstance(error, kind)), FAILED)
