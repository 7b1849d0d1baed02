"""Every exception that s3stream raises on purpose, in one tree.

::

    StreamError
    ├── ConfigError (ValueError)               an option, variable or URL is wrong
    ├── MissingDependencyError (ImportError)   an optional package is not installed
    ├── CheckpointError (ValueError)           the checkpoint itself is wrong
    │   ├── HeaderError                        a safetensors header is invalid
    │   ├── IncompleteCheckpointError          shards or tensors are missing or misplaced
    │   └── UnsupportedCheckpointError         valid, but not something we can stream
    ├── SourceError (OSError)                  the store refused, failed or misbehaved
    │   ├── ObjectNotFoundError (FileNotFoundError)
    │   ├── AccessDeniedError (PermissionError)
    │   ├── CredentialsError (PermissionError)
    │   ├── ObjectChangedError                 replaced or deleted while we were reading it
    │   ├── NotFetchedError                    bytes that a folder, fetched for some ranks, does not hold
    │   ├── IntegrityError                     bytes that a manifest or a stored checksum contradicts
    │   ├── BadResponseError                   an answer that contradicts the request
    │   └── SourceUnavailableError             still failing after every allowed retry
    ├── DestinationError (OSError)             the folder that files are to be written to refuses
    │   └── NoSpaceError                       it has no room for them
    └── LoadError (RuntimeError)               bytes arrived, but the model cannot be right
        ├── MissingParametersError             parameters that nothing was loaded into
        ├── VerificationError                  a parameter does not hold what its source holds
        ├── LeakedLazyTensorError              a lazy tensor survived the load
        └── RollbackError                      an update failed, and so did the way back

The split follows who can act: the caller, the owner of the checkpoint, the owner of the store, that of the
folder, or the author of the model code. Messages never hold a secret, a signed URL or a proxy password.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AccessDeniedError",
    "BadResponseError",
    "CheckpointError",
    "ConfigError",
    "CredentialsError",
    "DestinationError",
    "HeaderError",
    "IncompleteCheckpointError",
    "IntegrityError",
    "LeakedLazyTensorError",
    "LoadError",
    "MissingDependencyError",
    "MissingParametersError",
    "NoSpaceError",
    "NotFetchedError",
    "ObjectChangedError",
    "ObjectNotFoundError",
    "RollbackError",
    "SourceError",
    "SourceUnavailableError",
    "StreamError",
    "UnsupportedCheckpointError",
    "VerificationError",
    "shorten",
]


def shorten(names: Sequence[str], limit: int = 8) -> str:
    """Join `names` for a message, at most `limit` of them, saying how many were left out."""
    shown = ", ".join(names[:limit])
    rest = len(names) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


class StreamError(Exception):
    """Base of everything raised on purpose.

    Args:
        message: what was being done, to what, and what came back.
        hint: what to try, in one sentence; printed after the message.

    Attributes:
        rank: on which it happened, if on another of those that load together.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.rank: int | None = None

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Ranks hand their errors to each other; the default would drop keyword arguments.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(kind: type[StreamError], args: tuple[object, ...], state: dict[str, object]) -> StreamError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(StreamError, ValueError):
    """An option, environment variable or URL is wrong."""


class MissingDependencyError(StreamError, ImportError):
    """An optional package is needed for what was asked and is not installed."""


class CheckpointError(StreamError, ValueError):
    """The checkpoint is wrong; reading it again will not help."""


class HeaderError(CheckpointError):
    """A safetensors header that the format forbids."""


class IncompleteCheckpointError(CheckpointError):
    """Shards or tensors are missing, duplicated, or not where the index says."""


class UnsupportedCheckpointError(CheckpointError):
    """The files are there, but in a form that cannot be streamed."""


class SourceError(StreamError, OSError):
    """The store refused, failed or misbehaved.

    Attributes:
        url: the object or prefix, as the user would write it (never a signed URL).
        start, end: the byte range asked for, half open; None when no range was involved.
        status: the HTTP status, where there was one.
        code: the store's own error code, such as ``SlowDown``.
        request_id: the store's id for the failed request, for its support team.
        attempts: how many times it was tried.
        elapsed_seconds: from the first try to giving up.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        url: str | None = None,
        start: int | None = None,
        end: int | None = None,
        status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
        attempts: int = 1,
        elapsed_seconds: float = 0.0,
    ) -> None:
        super().__init__(message, hint=hint)
        self.url = url
        self.start = start
        self.end = end
        self.status = status
        self.code = code
        self.request_id = request_id
        self.attempts = attempts
        self.elapsed_seconds = elapsed_seconds

    def __str__(self) -> str:
        where = self.url or ""
        if self.start is not None and self.end is not None:
            where += f" bytes {self.start}-{self.end - 1}"
        facts = []
        if self.status is not None:
            facts.append(f"status {self.status}")
        if self.code:
            facts.append(self.code)
        if self.request_id:
            facts.append(f"request id {self.request_id}")
        if self.attempts > 1:
            facts.append(f"{self.attempts} attempts in {self.elapsed_seconds:.1f} s")
        text = f"{where}: {self.message}" if where else self.message
        if facts:
            text += f" [{', '.join(facts)}]"
        return f"{text} ({self.hint})" if self.hint else text


class ObjectNotFoundError(SourceError, FileNotFoundError):
    """The bucket, prefix, object or file is not there."""


class AccessDeniedError(SourceError, PermissionError):
    """The store knows who we are and says no. Never retried."""


class CredentialsError(SourceError, PermissionError):
    """There are no credentials, or the store does not accept them."""


class ObjectChangedError(SourceError):
    """The object was replaced, truncated or deleted during the load. Never retried."""


class NotFetchedError(SourceError):
    """The folder was fetched for some ranks, and does not hold these bytes of a file. Never retried."""


class BadResponseError(SourceError):
    """The answer contradicts the request: wrong range, length, encoding or identity."""


class IntegrityError(SourceError):
    """The bytes are not those that the checkpoint's manifest, or the checksum that the store keeps, was made of."""


class SourceUnavailableError(SourceError):
    """Every allowed retry failed."""


class DestinationError(StreamError, OSError):
    """A folder that files are to be written to refuses: no permission, read-only, a link in the way."""


class NoSpaceError(DestinationError):
    """The folder has no room: too few bytes, inodes or too small a quota."""


class LoadError(StreamError, RuntimeError):
    """The bytes arrived but the model cannot be right."""


class MissingParametersError(LoadError):
    """Parameters that nothing was loaded into.

    Attributes:
        names: the parameters, sorted.
    """

    def __init__(self, message: str, *, names: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.names = tuple(names)


class VerificationError(LoadError):
    """Read again, the source of a parameter holds other bytes than the parameter."""


class LeakedLazyTensorError(LoadError):
    """A lazy tensor is still part of the model, or was used after its load ended."""


class RollbackError(LoadError):
    """An update failed half-way, and what was served before could not be loaded again: there is nothing to serve."""
