"""Servers that tests share, and a clean environment for each test."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.cli.store import start_store
from tests.certificates import Certificates, make_certificates
from tests.servers.fake_gcs import FakeGcs, start_fake_gcs
from tests.servers.object_server import ObjectServer
from tests.servers.seaweed import SeaweedServer, start_seaweed

ACCESS_KEY, SECRET_KEY = "AKIDEXAMPLE", "SECRETEXAMPLE"


# Without an engine in this environment, its tests are not collected; CI has others, in which they are.
collect_ignore = [engine for engine in ("vllm", "sglang") if importlib.util.find_spec(engine) is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--census", help="file to which tests/vllm/test_census.py writes its table")
    parser.addoption("--fault-table", help="file to which tests/faults/test_matrix.py writes its table")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the developer's credentials, profiles, proxies or options."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "S3STREAM_", "GOOGLE_", "GCE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no-gcloud"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("S3STREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    with start_store() as url:
        yield url


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    with start_seaweed(tmp_path_factory.mktemp("seaweed"), ACCESS_KEY, SECRET_KEY) as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[FakeGcs]:
    with start_fake_gcs() as server:
        yield server


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with ObjectServer(require_signature=True) as started:
        yield started


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))
