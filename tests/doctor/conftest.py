"""Servers and certificates that the doctor is shown."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.certificates import Certificates
from tests.credentials.conftest import setup
from tests.doctor.looking import put_model
from tests.servers.object_server import ObjectServer

__all__ = ["setup"]


@pytest.fixture
def store(server: ObjectServer) -> ObjectServer:
    put_model(server)
    return server


@pytest.fixture
def secure_store() -> Iterator[Callable[[Certificates], ObjectServer]]:
    """Starts stores that speak TLS with the given certificate."""
    with ExitStack() as stack:

        def start(certificates: Certificates) -> ObjectServer:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates.server)
            started = stack.enter_context(ObjectServer(require_signature=True, tls=context))
            put_model(started)
            return started

        yield start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "certificates"
    made.mkdir()
    return made
