"""What ends a command from outside: SIGTERM and SIGINT, in every container too.

The kernel gives the first process of a container no default handlers: without ours, it would ignore a SIGTERM and be
killed when its time is up. And Click would turn a SIGINT into exit code 1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

__all__ = ["ending_on_signals"]


class _Ended(SystemExit):
    """Raised in the main thread, wherever it is."""


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Within the context a first signal unwinds it, and the process exits with 128 and the signal's number, as shells
    count; a second one ends it where it stands, as far as the kernel lets it.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    try:
        yield
    except _Ended as ended:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            name = signal.Signals(int(str(ended.code)) - 128).name
            print(f"s3stream: ended by {name}", file=sys.stderr, flush=True)
        # Threads that look up a name, or wait for a volume that hangs, would be waited for otherwise.
        os._exit(int(str(ended.code)))


def _end(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)
    raise _Ended(128 + number)
