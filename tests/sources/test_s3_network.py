"""TLS, private authorities and proxies: the native reader does as botocore does, for list and read alike."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.config import Config

from streamer.config import StreamConfig
from streamer.errors import ConfigError, SourceError, SourceUnavailableError
from streamer.sources import ObjectInfo, open_source
from tests.certificates import Certificates, make_certificates
from tests.servers.object_server import ObjectServer
from tests.servers.proxy import Proxy
from tests.servers.seaweed import SeaweedServer

BODY = bytes(range(256)) * 2000


def tls_server(certificates: Certificates) -> ObjectServer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server)
    server = ObjectServer(require_signature=True, tls=context)
    server.put("bucket", "m/a.bin", BODY)
    return server


@pytest.fixture
def secure(certificates: Certificates) -> Iterator[ObjectServer]:
    with tls_server(certificates) as server:
        yield server


def upload(seaweed: SeaweedServer, bucket: str, key: str, body: bytes) -> None:
    client = boto3.client("s3", endpoint_url=seaweed.url, region_name="us-east-1", config=Config(proxies={}))
    client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key=key, Body=body)
    client.close()


def roundtrip(server: ObjectServer, **options: object) -> None:
    """List, then read everything in parallel pieces."""

    async def run() -> None:
        config = StreamConfig.resolve(
            {"endpoint_url": server.url, "retry_attempts": 2, "retry_first_wait_seconds": 0.01, **options}
        )
        source = open_source("s3://bucket/m", config)
        try:
            (item,) = await source.list()
            buffer = bytearray(item.size)
            step = 100_000
            await asyncio.gather(
                *(
                    source.read_into(item, start, [memoryview(buffer)[start : start + step]])
                    for start in range(0, item.size, step)
                )
            )
            assert buffer == BODY
        finally:
            await source.close()

    if options.get("use_uvloop"):
        import uvloop

        uvloop.run(run())
    else:
        asyncio.run(run())


@pytest.mark.parametrize("transport", ["native", "sdk"])
@pytest.mark.parametrize("use_uvloop", [False, True])
def test_private_authority_by_option(
    secure: ObjectServer, certificates: Certificates, transport: str, use_uvloop: bool
) -> None:
    roundtrip(secure, ca_bundle=str(certificates.authority), transport=transport, use_uvloop=use_uvloop)


def test_private_authority_by_variable(
    secure: ObjectServer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))
    roundtrip(secure)


def test_private_authority_by_profile(
    secure: ObjectServer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = "aws_access_key_id = AKIDPROFILE\naws_secret_access_key = x\n"
    settings = f"ca_bundle = {certificates.authority}\nregion = eu-west-3\n"
    (tmp_path / "config").write_text(f"[profile mine]\n{keys}{settings}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    roundtrip(secure, profile="mine")
    assert all("AKIDPROFILE" in sent and "eu-west-3" in sent for sent in secure.counters.authorization)


def test_untrusted_certificate_names_the_remedy(secure: ObjectServer) -> None:
    with pytest.raises(SourceError, match="certificate.*not trusted.*AWS_CA_BUNDLE"):
        roundtrip(secure)


def test_host_name_must_match(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path, name="DNS:elsewhere.example")
    with tls_server(certificates) as server, pytest.raises(SourceError):
        roundtrip(server, ca_bundle=str(certificates.authority))


def test_missing_bundle_is_named(secure: ObjectServer, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, SourceError), match="nowhere.pem|CA bundle"):
        roundtrip(secure, ca_bundle=str(tmp_path / "nowhere.pem"))


def test_verification_is_switched_off_only_explicitly_and_with_a_warning(secure: ObjectServer) -> None:
    with pytest.warns(UserWarning, match="any certificate is accepted"):
        roundtrip(secure, tls_verify=False)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy"])
def test_plain_http_through_a_proxy(server: ObjectServer, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    server.put("bucket", "m/a.bin", BODY)
    with Proxy("user:pass word") as proxy:
        if variable.isupper():
            monkeypatch.delenv("REQUEST_METHOD", raising=False)
        monkeypatch.setenv(variable, f"http://user:pass%20word@127.0.0.1:{proxy.port}")
        roundtrip(server)
        bodies = [line for line in proxy.seen if "a.bin" in line]
        assert len(bodies) == 6
        assert all(line.startswith(f"GET {server.url}/bucket/m/a.bin?") for line in bodies)


def test_https_through_a_tunnel(
    secure: ObjectServer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy("user:secret") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@127.0.0.1:{proxy.port}")
        roundtrip(secure, ca_bundle=str(certificates.authority))
        assert {line.split(" ")[0] for line in proxy.seen} == {"CONNECT"}


def test_refused_tunnel_says_who_refused_and_hides_the_password(
    secure: ObjectServer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy("user:other") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:hunter2@127.0.0.1:{proxy.port}")
        with pytest.raises(SourceUnavailableError) as caught:
            roundtrip(secure, ca_bundle=str(certificates.authority))
    assert "hunter2" not in str(caught.value) + repr(caught.value)


def test_no_proxy_is_honoured(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.put("bucket", "m/a.bin", BODY)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    roundtrip(server)


def test_dead_proxy_is_named(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.put("bucket", "m/a.bin", BODY)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with pytest.raises(SourceUnavailableError):
        roundtrip(server)


def test_tls_proxy_points_to_the_sdk(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "https://user:hunter2@127.0.0.1:1")
    with pytest.raises(ConfigError, match="transport=sdk") as caught:
        roundtrip(server)
    assert "hunter2" not in str(caught.value)


def test_the_sdk_tries_a_proxy_that_speaks_tls(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "https://user:hunter2@127.0.0.1:1")
    with pytest.raises(SourceUnavailableError, match="proxy") as caught:
        roundtrip(server, transport="sdk")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("how", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "profile"])
def test_endpoint_as_botocore_resolves_it(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    server.put("bucket", "m/a.bin", BODY)
    if how == "profile":
        (tmp_path / "config").write_text(
            f"[profile mine]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = {server.url}\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_PROFILE", "mine")
        roundtrip(server, endpoint_url=None)
    else:
        monkeypatch.setenv(how, server.url)
        roundtrip(server, endpoint_url=None)
    assert server.counters.requests["LIST"] == 1
    assert server.counters.requests["GET"] == 6


def test_session_token_is_sent_for_list_and_read(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.put("bucket", "m/a.bin", BODY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKEN123")
    headers: list[str] = []
    from tests.servers.object_server import Fault

    server.faults = [
        Fault(
            lambda request, _: headers.append(request.headers.get("x-amz-security-token", "")),
            method="LIST",
            times=None,
        )
    ]
    roundtrip(server)
    assert headers == ["TOKEN123"]
    reads = [sent for sent in server.counters.authorization if "a.bin" in sent]
    assert len(reads) == 6
    assert all("X-Amz-Security-Token=TOKEN123" in sent for sent in reads)


def test_missing_profile_is_named(server: ObjectServer) -> None:
    with pytest.raises(ConfigError, match="no profile 'nobody'"):
        roundtrip(server, profile="nobody")


@pytest.mark.parametrize("style", ["auto", "path"])
def test_path_style_for_custom_endpoints(server: ObjectServer, style: str) -> None:
    server.put("bucket", "m/a.bin", BODY)
    roundtrip(server, addressing_style=style)


def test_virtual_style_puts_the_bucket_in_the_host() -> None:
    async def address() -> str:
        from streamer.sources.s3 import S3Source

        source = open_source(
            "s3://bucket/m", StreamConfig(endpoint_url="http://s3.example", addressing_style="virtual")
        )
        assert isinstance(source, S3Source)
        try:
            return (await source._address(ObjectInfo("a.bin", 1), None)).origin.authority
        finally:
            await source.close()

    assert asyncio.run(address()) == "bucket.s3.example"


@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_a_front_end_that_changes_accept_encoding(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """As that of GCS does, whose S3 interface then refuses signatures that cover the header."""
    changed: list[str] = []

    def change(line: str) -> str:
        if not line.lower().startswith("accept-encoding:"):
            return line
        changed.append(line)
        return f"{line},gzip(gfe)"

    async def run() -> None:
        config = StreamConfig(endpoint_url=seaweed.url, region="auto", transport=transport)  # type: ignore[arg-type]
        source = open_source(f"s3://front-{transport}/m", config)
        try:
            (item,) = await source.list()
            assert await source.stat("a.bin") == item
            buffer = bytearray(1000)
            await source.read_into(item, 100, [memoryview(buffer)])
            assert buffer == BODY[100:1100]
        finally:
            await source.close()

    upload(seaweed, f"front-{transport}", "m/a.bin", BODY)
    with Proxy(change=change) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        asyncio.run(run())
    assert len(changed) >= 3
