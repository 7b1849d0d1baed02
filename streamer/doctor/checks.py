"""What a check is, and the list that they go into."""

from __future__ import annotations

import time
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from streamer.errors import MissingDependencyError, SourceError, StreamError
from streamer.transport.failures import CredentialsExpired
from streamer.transport.retry import TransientFailure

__all__ = ["Chart", "Check", "Diagnosis", "Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, and what to do about it where it is right, but not as it should be."""

    detail: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        ok: None when it was not looked at, and `detail` says why.
        remedy: what to try; always there when `ok` is false, else for what works and deserves a warning.
        error: what failed.
    """

    name: str
    ok: bool | None
    detail: str
    remedy: str | None = None
    seconds: float = 0.0
    error: StreamError | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks, in the order they were made."""

    url: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return not any(check.ok is False for check in self.checks)

    @property
    def error(self) -> StreamError | None:
        """What failed first; later failures often follow from it."""
        return next((check.error for check in self.checks if check.error is not None), None)


@dataclass(slots=True)
class Chart:
    """Runs checks and writes down what came of them.

    Args:
        progress: called with the name of each check before it is made.
    """

    progress: Callable[[str], None] = lambda name: None
    checks: list[Check] = field(default_factory=list)

    def passed(self, *names: str) -> bool:
        """Whether none of these checks failed; one that was not made did not."""
        return not any(check.ok is False for check in self.checks if check.name in names)

    async def run(self, name: str, examine: Callable[[], Awaitable[Finding]]) -> bool:
        """Make one check; return whether it found what it should."""
        self.progress(name)
        began = time.perf_counter()
        # What would be a warning of a load is said by the check whose matter it is.
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                finding = await examine()
            except (TransientFailure, CredentialsExpired) as failure:
                return self._failed(name, failure.final, began)
            except StreamError as error:
                return self._failed(name, error, began)
        seconds = time.perf_counter() - began
        self.checks.append(Check(name, True, finding.detail, finding.remedy, seconds))
        return True

    def skip(self, name: str, why: str) -> None:
        """Write down that a check was not made."""
        self.checks.append(Check(name, None, why))

    def _failed(self, name: str, error: StreamError, began: float) -> bool:
        detail = str(error).removesuffix(f" ({error.hint})") if error.hint else str(error)
        remedy = error.hint or _usual_remedy(error)
        self.checks.append(Check(name, False, detail, remedy, time.perf_counter() - began, error))
        return False


def _usual_remedy(error: StreamError) -> str:
    if isinstance(error, SourceError):
        return "look for this status or code in the store's documentation and log"
    if isinstance(error, MissingDependencyError):
        return "install the package that the message names"
    return "correct what the message names"
