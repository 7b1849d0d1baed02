"""An S3 store in this process, for the demo and the tests: moto's server, on a loopback port."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from streamer.errors import MissingDependencyError

__all__ = ["missing_for_demo", "start_store"]


def missing_for_demo(error: ImportError) -> MissingDependencyError:
    """Say how to install what `error` misses."""
    return MissingDependencyError(f"the demo needs the package {error.name}", hint="pip install 's3stream[demo]'")


@contextmanager
def start_store() -> Iterator[str]:
    """Run the store for as long as the context lasts; yields its endpoint URL.

    Raises:
        MissingDependencyError: moto or Flask is not installed.
    """
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise missing_for_demo(error) from error
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line, and a signed URL, per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()
