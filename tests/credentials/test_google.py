"""Ways to Google's tokens, each against servers of our own, and what happens when one expires or gives none."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import google.auth.compute_engine._metadata as metadata
import pytest
import safetensors.torch
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

import streamer
from streamer.config import StreamConfig
from streamer.errors import ConfigError, CredentialsError, MissingDependencyError, SourceError, SourceUnavailableError
from streamer.sources import ObjectInfo, Source, open_source
from tests.servers.gcs import GcsServer
from tests.servers.google import GoogleServer
from tests.servers.messages import Fault, Request, Response
from tests.servers.proxy import Proxy

BODY = bytes(range(256)) * 2000


@pytest.fixture
def tokens() -> Iterator[GoogleServer]:
    with GoogleServer() as server:
        yield server


@pytest.fixture
def gcs(tokens: GoogleServer) -> Iterator[GcsServer]:
    """Accepts what `tokens` gives out."""
    with GcsServer(tokens=tokens.tokens) as server:
        server.put("bucket", "m/a.bin", BODY)
        yield server


@pytest.fixture(scope="module")
def key() -> str:
    made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return made.private_bytes(encoding, form, serialization.NoEncryption()).decode()


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers where the metadata server would be."""
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")
    monkeypatch.setattr(metadata, "_GCE_METADATA_HOST", "127.0.0.1:9")


Ways = dict[str, Callable[[], None]]


@pytest.fixture
def ways(tokens: GoogleServer, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ways:
    """By name, what makes the environment give these credentials."""

    def give(document: dict[str, Any]) -> None:
        (tmp_path / "credentials.json").write_text(json.dumps(document))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "credentials.json"))

    account = {
        "type": "service_account",
        "project_id": "project",
        "private_key_id": "1",
        "private_key": key,
        "client_email": "me@project.iam.gserviceaccount.com",
        "token_uri": f"{tokens.url}/token",
    }
    (tmp_path / "subject").write_text("TOKEN-OF-THE-POD")
    external = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/pool/providers/here",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{tokens.url}/sts",
        "credential_source": {"file": str(tmp_path / "subject")},
    }
    impersonation = f"{tokens.url}/v1/projects/-/serviceAccounts/you@project:generateAccessToken"

    def user() -> None:
        folder = tmp_path / "gcloud"
        folder.mkdir()
        login = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "r"}
        document = {**login, "quota_project_id": "my-quota"}
        (folder / "application_default_credentials.json").write_text(json.dumps(document))
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(folder))
        monkeypatch.setattr("google.oauth2.credentials._GOOGLE_OAUTH2_TOKEN_ENDPOINT", f"{tokens.url}/token")

    def machine() -> None:
        monkeypatch.setenv("GCE_METADATA_IP", tokens.host)
        monkeypatch.setenv("GCE_METADATA_HOST", tokens.host)
        monkeypatch.setattr(metadata, "_GCE_METADATA_HOST", tokens.host)

    monkeypatch.setattr("google.auth.iam._IAM_ENDPOINT", impersonation.replace("you@project", "{}"))
    return {
        "service account": lambda: give(account),
        "user of gcloud": user,
        "metadata server": machine,
        "workload identity federation": lambda: give(external),
        "federation and impersonation": lambda: give({**external, "service_account_impersonation_url": impersonation}),
        "impersonation": lambda: give(
            {
                "type": "impersonated_service_account",
                "service_account_impersonation_url": impersonation,
                "source_credentials": account,
            }
        ),
    }


NAMES = (
    "service account",
    "user of gcloud",
    "metadata server",
    "workload identity federation",
    "federation and impersonation",
    "impersonation",
)


def use(server: GcsServer, work: Callable[[Source], Awaitable[Any]], **options: object) -> Any:
    async def run() -> Any:
        given = {"endpoint_url": server.url, "retry_attempts": 3, "retry_first_wait_seconds": 0.001, **options}
        source = open_source("gs://bucket/m", StreamConfig.resolve(given))
        try:
            return await work(source)
        finally:
            await source.close()

    return asyncio.run(run())


async def read(source: Source, item: ObjectInfo, start: int = 0, length: int = 1000) -> None:
    buffer = bytearray(length)
    await source.read_into(item, start, [memoryview(buffer)])
    assert buffer == BODY[start : start + length]


async def everything(source: Source) -> None:
    (item,) = await source.list()
    assert item == await source.stat("a.bin")
    await asyncio.gather(*(read(source, item, start) for start in range(0, 400_000, 20_000)))


@pytest.mark.parametrize("way", NAMES)
def test_ways_to_a_token(way: str, ways: Ways, gcs: GcsServer) -> None:
    ways[way]()
    billed: list[str | None] = []
    for kind in ("LIST", "STAT", "GET"):
        note = Fault(lambda request, _: billed.append(request.headers.get("x-goog-user-project")), "", None, 0, kind)
        gcs.faults.append(note)
    use(gcs, everything)
    assert all(sent.startswith("Bearer ya29.") or "federated" in sent for sent in gcs.counters.authorization)
    assert len(set(gcs.counters.authorization)) == 1, "one token is enough"
    assert len(gcs.counters.authorization) == 22
    assert set(billed) == {"my-quota" if way == "user of gcloud" else None}


def test_the_project_that_pays(ways: Ways, gcs: GcsServer) -> None:
    ways["service account"]()
    gcs.payer = "project"  # of the file
    use(gcs, everything, requester_pays=True)
    with pytest.raises(SourceError, match="requester_pays"):
        use(gcs, everything)
    ways["workload identity federation"]()
    with pytest.raises(ConfigError, match="none is known"):
        use(gcs, everything, requester_pays=True)


@pytest.mark.parametrize("way", NAMES)
def test_a_token_that_the_store_refuses_is_renewed_once_for_all(
    way: str, ways: Ways, gcs: GcsServer, tokens: GoogleServer
) -> None:
    ways[way]()

    async def work(source: Source) -> None:
        (item,) = await source.list()
        before = len(tokens.tokens)
        tokens.tokens.clear()
        await asyncio.gather(*(read(source, item, start) for start in range(0, 400_000, 20_000)))
        assert len(tokens.tokens) <= before, "each asked for a token of its own"
        tokens.tokens.clear()
        assert await source.stat("a.bin") == item

    use(gcs, work)


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_a_token_that_expires_during_a_load(ways: Ways, gcs: GcsServer, tokens: GoogleServer, use_uvloop: bool) -> None:
    ways["metadata server"]()
    values = {f"layer.{number}": torch.arange(20_000.0) + number for number in range(20)}
    gcs.put("bucket", "model/model.safetensors", safetensors.torch.save(values))
    gcs.faults.append(Fault(lambda request, response: tokens.tokens.clear(), skip=8))
    options = {"endpoint_url": gcs.url, "request_bytes": 65536, "concurrency": 4, "use_uvloop": use_uvloop}
    loaded = dict(streamer.iterate("gs://bucket/model", options))
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], value) for name, value in values.items())
    used = Counter(gcs.counters.authorization)
    assert len(used) == 2
    assert min(used.values()) > 5


def test_a_token_that_is_never_accepted(ways: Ways, gcs: GcsServer) -> None:
    ways["service account"]()
    gcs.tokens = {"another"}
    with pytest.raises(CredentialsError, match=r"gs://bucket/m/: .*token: Invalid Credentials \[status 401, authError"):
        use(gcs, everything)
    assert gcs.counters.requests["LIST"] == 2

    async def work(source: Source) -> None:
        item = ObjectInfo("a.bin", len(BODY), gcs.generation("bucket", "m/a.bin"))
        with pytest.raises(CredentialsError, match=r"a\.bin bytes 0-999: the store does not accept the token"):
            await read(source, item)

    use(gcs, work)
    assert gcs.counters.requests["GET"] == 2


def test_tokens_are_renewed_before_they_expire(ways: Ways, gcs: GcsServer, tokens: GoogleServer) -> None:
    ways["service account"]()
    tokens.expires_in = 226  # google-auth wants to renew it in a second
    refusals: list[int] = []
    gcs.faults.append(Fault(lambda request, response: _note(response, refusals), times=None))

    async def work(source: Source) -> None:
        (item,) = await source.list()
        await read(source, item)
        assert tokens.asked["/token"] == 1
        await asyncio.sleep(1.2)
        tokens.expires_in = 3600
        await asyncio.gather(*(read(source, item, start) for start in range(0, 400_000, 20_000)))
        assert tokens.asked["/token"] == 2
        assert source.stats.retries == 0

    use(gcs, work)
    assert set(refusals) == {206}


def _note(response: Response, seen: list[int]) -> None:
    seen.append(response.status)


def test_a_renewal_that_fails_early_does_no_harm(
    ways: Ways, gcs: GcsServer, tokens: GoogleServer, caplog: pytest.LogCaptureFixture
) -> None:
    ways["service account"]()
    tokens.expires_in = 226

    async def work(source: Source) -> None:
        (item,) = await source.list()
        await asyncio.sleep(1.2)
        tokens.refusal = (400, {"error": "invalid_grant", "error_description": "not now"})
        with caplog.at_level(logging.WARNING, logger="streamer"):
            await read(source, item)
        assert "could not be renewed yet" in caplog.text

    use(gcs, work)


@pytest.mark.parametrize("way", NAMES)
def test_tokens_that_cannot_be_had_at_present(
    way: str, ways: Ways, gcs: GcsServer, tokens: GoogleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than google-auth tries by itself."""
    ways[way]()
    monkeypatch.setattr("google.auth._exponential_backoff.time", types.SimpleNamespace(sleep=lambda _: None))
    tokens.refusal, tokens.failures = (503, {"error": "internal_failure"}), 6
    use(gcs, everything, retry_attempts=8)
    assert tokens.failures == 0


def test_a_machine_without_a_service_account(ways: Ways, gcs: GcsServer, tokens: GoogleServer) -> None:
    ways["metadata server"]()
    tokens.refusal = (404, {})
    with pytest.raises(CredentialsError, match="give no token"):
        use(gcs, everything)
    assert max(count for path, count in tokens.asked.items() if path.endswith("/token")) == 1


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (None, "credentials.json was not found"),
        ("{", "not a valid json file"),
        ('{"type": "nonsense"}', "does not have a valid type"),
        ('{"type": "service_account", "private_key": "SECRET"}', "service account"),
    ],
)
def test_files_that_are_none(ways: Ways, gcs: GcsServer, tmp_path: Path, document: str | None, words: str) -> None:
    ways["service account"]()
    (tmp_path / "credentials.json").unlink()
    if document is not None:
        (tmp_path / "credentials.json").write_text(document)
    with pytest.raises(CredentialsError, match=words) as caught:
        use(gcs, everything)
    assert "SECRET" not in str(caught.value)


def test_a_token_of_the_pod_that_is_not_there(ways: Ways, gcs: GcsServer, tmp_path: Path) -> None:
    ways["workload identity federation"]()
    (tmp_path / "subject").unlink()
    with pytest.raises(CredentialsError, match=r"give no token: .*subject"):
        use(gcs, everything)


@pytest.mark.parametrize("way", ["service account", "workload identity federation", "impersonation"])
def test_whoever_gives_tokens_refuses(
    way: str, ways: Ways, gcs: GcsServer, tokens: GoogleServer, caplog: pytest.LogCaptureFixture
) -> None:
    ways[way]()
    tokens.refusal = (400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."})
    with caplog.at_level(logging.DEBUG), pytest.raises(CredentialsError, match="give no token: .*") as caught:
        use(gcs, everything)
    assert caught.value.__cause__ is None
    assert "TOKEN-OF-THE-POD" not in str(caught.value) + caplog.text
    assert "PRIVATE KEY" not in str(caught.value) + caplog.text


def test_whoever_gives_tokens_cannot_be_reached(
    ways: Ways, gcs: GcsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ways["service account"]()
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "token_uri": "http://127.0.0.1:9/token?key=SECRET"}))
    monkeypatch.setenv("HTTP_PROXY", "http://user:hunter2@127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", gcs.url.removeprefix("http://"))
    with pytest.raises(SourceUnavailableError, match="no token could be had") as caught:
        use(gcs, everything, retry_attempts=1)
    assert "hunter2" not in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_tokens_go_through_the_proxy_but_never_those_of_the_machine(
    ways: Ways, gcs: GcsServer, tokens: GoogleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy() as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        ways["service account"]()
        use(gcs, everything)
        assert any(f"POST {tokens.url}/token" in line for line in proxy.seen)
        proxy.seen.clear()
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
        ways["metadata server"]()
        use(gcs, everything)
        assert proxy.seen
        assert not any("computeMetadata" in line for line in proxy.seen)


def test_no_credentials_at_all_is_said_soon(gcs: GcsServer) -> None:
    began = time.monotonic()
    with pytest.raises(CredentialsError, match=r"no credentials were found.*GOOGLE_APPLICATION_CREDENTIALS.*anonymous"):
        use(gcs, everything)
    assert time.monotonic() - began < 8
    assert not gcs.counters.requests


def test_anonymous_looks_for_nothing(gcs: GcsServer, tokens: GoogleServer, ways: Ways) -> None:
    ways["metadata server"]()
    gcs.tokens = None
    use(gcs, everything, anonymous=True)
    assert not tokens.asked
    assert not any("Bearer" in sent for sent in gcs.counters.authorization)


def test_without_google_auth(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("google.auth")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(MissingDependencyError, match=r"gs://bucket/m/ needs the package google-auth.*s3stream\[gcs\]"):
        use(gcs, everything)
    gcs.tokens = None
    use(gcs, everything, anonymous=True)  # which needs nothing


def test_messages_and_reprs_hold_no_token(ways: Ways, gcs: GcsServer, caplog: pytest.LogCaptureFixture) -> None:
    ways["service account"]()

    def quoting(request: Request, response: Response) -> Response:
        from tests.servers.gcs import gcs_error

        return gcs_error(403, "forbidden", f"who sent authorization: {request.headers['authorization']}")

    async def work(source: Source) -> None:
        (item,) = await source.list()
        gcs.faults.append(Fault(quoting, times=None))
        with pytest.raises(SourceError, match="access denied") as caught:
            await read(source, item)
        assert "token-" not in str(caught.value) + repr(source) + str(vars(caught.value))

    with caplog.at_level(logging.DEBUG, logger="streamer"):
        use(gcs, work)
    assert "ya29" not in caplog.text


def test_tokens_are_not_sent_in_the_open(ways: Ways) -> None:
    ways["service account"]()
    with pytest.raises(ConfigError, match="unencrypted"):
        open_source("gs://bucket/m", StreamConfig(endpoint_url="http://storage.example"))
