"""The command ``s3stream``."""

from __future__ import annotations

import logging
import sys

from streamer.cli.signals import ending_on_signals

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what to install for it."""
    with ending_on_signals():
        _run()


def _run() -> None:
    try:
        from streamer.cli.app import app
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        print(
            f"s3stream: the command line needs the package {error.name}; run: pip install 's3stream[cli]'",
            file=sys.stderr,
        )
        sys.exit(9)
    # Credentials that cannot be renewed are our error, in one line; no need for a warning and a traceback before.
    logging.getLogger("aiobotocore").setLevel(logging.ERROR)
    app()
