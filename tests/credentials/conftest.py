"""What the tests of credentials share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.credentials.services import Guard, Issuer, temporary
from tests.credentials.ways import Setup, no_credentials
from tests.servers.object_server import ObjectServer

BODY = bytes(range(256)) * 2000


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Setup]:
    """No credentials anywhere, and nothing of this machine's home folder."""
    no_credentials(monkeypatch)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    # Nested clients would otherwise try five times, seconds apart, before an error comes out.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with ExitStack() as stack:
        yield Setup(monkeypatch, home, stack, Issuer(temporary()))


@pytest.fixture
def guard(server: ObjectServer) -> Guard:
    server.put("bucket", "m/a.bin", BODY)
    return Guard(server)


@pytest.fixture(params=["native", "sdk"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)
