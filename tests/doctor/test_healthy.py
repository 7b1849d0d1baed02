"""Set-ups that work: every check says so, and what decided it; and what the doctor asks a store for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.certificates import Certificates
from tests.conftest import ACCESS_KEY
from tests.credentials.ways import WAYS, Setup
from tests.doctor.looking import FILES, check_of, everything, failed, look, put_model
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.servers.proxy import Proxy
from tests.servers.s3_client import s3_client
from tests.servers.seaweed import SeaweedServer

MADE = ["list", "head", "read", "pin", "checkpoint", "throughput"]


def upload(url: str, bucket: str) -> None:
    client = s3_client(url)
    client.create_bucket(Bucket=bucket)
    for name, body in FILES.items():
        client.put_object(Bucket=bucket, Key=f"m/{name}", Body=body)
    client.close()


def test_moto(moto_url: str) -> None:
    upload(moto_url, "doctor")
    found = look("s3://doctor/m", endpoint_url=moto_url)
    assert found.ok, everything(found)
    assert [check.name for check in found.checks if check.ok is None] == ["tls"]
    assert [check.name for check in found.checks][-6:] == MADE
    assert check_of(found, "credentials").detail == "AK... from the environment (AWS_ACCESS_KEY_ID)"
    assert check_of(found, "clock").detail.startswith("within ")
    assert check_of(found, "checkpoint").detail.startswith(
        "1 file of weights, 262222 bytes; model.safetensors holds 1 tensor (U8)"
    )
    assert check_of(found, "pin").detail == "a read of other content is refused (412)"


def test_seaweedfs_and_its_refusals(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that checks signatures, so that a wrong secret is refused in its own words."""
    upload(seaweed.url, "doctor")
    found = look("s3://doctor/m", endpoint_url=seaweed.url)
    assert found.ok, everything(found)
    assert check_of(found, "pin").detail == "a read of other content is refused (412)"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG")
    found = look("s3://doctor/m", endpoint_url=seaweed.url)
    assert failed(found) == ["list"]
    assert "secret key does not belong to the access key" in str(check_of(found, "list").remedy)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDNOBODY")
    found = look("s3://doctor/m", endpoint_url=seaweed.url)
    assert "the store does not know this access key" in str(check_of(found, "list").remedy)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_other_places(tmp_path: Path, scheme: str) -> None:
    import fsspec

    if scheme == "memory://":
        for name, body in FILES.items():
            fsspec.filesystem("memory").pipe_file(f"/doctor/{name}", body)
        found = look("memory://doctor")
    else:
        for name, body in FILES.items():
            (tmp_path / name).write_bytes(body)
        found = look(f"{scheme}{tmp_path}")
    assert found.ok, everything(found)
    assert [check.name for check in found.checks] == ["url", *MADE]
    assert all(check.ok for check in found.checks)
    if scheme != "memory://":
        assert check_of(found, "pin").detail == "a read of other content is refused"


def test_a_single_file(store: ObjectServer) -> None:
    found = look("s3://bucket/m/config.json", endpoint_url=store.url)
    assert failed(found) == ["list"], "which is not weights, so it is taken for a folder"
    found = look("s3://bucket/m/model.safetensors", endpoint_url=store.url)
    assert found.ok
    assert check_of(found, "list").ok is None
    assert check_of(found, "checkpoint").detail == "one file; model.safetensors holds 1 tensor (U8)"


def test_only_what_a_load_asks_for(store: ObjectServer) -> None:
    """Never HeadBucket, GetBucketLocation or ListBuckets, for which readers seldom have permissions."""
    seen: list[Request] = []

    def note(request: Request, response: Response) -> None:
        seen.append(request)

    store.faults = [Fault(note, method=kind, times=None) for kind in ("LIST", "HEAD", "GET")]
    assert look(endpoint_url=store.url).ok
    assert {request.method for request in seen} == {"GET", "HEAD"}
    assert all(request.bucket == "bucket" for request in seen)
    assert all(request.key or request.query.get("list-type") == ["2"] for request in seen)
    assert not any("location" in request.query for request in seen)
    unsigned = [r for r in seen if "authorization" not in r.headers and "X-Amz-Signature" not in r.query]
    assert [request.query["max-keys"] for request in unsigned] == [["1"]]


@pytest.mark.parametrize("way", WAYS)
def test_who_we_are(store: ObjectServer, setup: Setup, way: str) -> None:
    keys = WAYS[way](setup)
    found = look(endpoint_url=store.url, **setup.options)
    assert found.ok, everything(found)
    named = {
        "environment": "AWS_ACCESS_KEY_ID",
        "shared_file": "shared credentials file",
        "named_profile": "shared credentials file",
        "sso": "SSO, reader",
        "web_identity": "web identity token, arn:aws:iam",
        "assumed_role": "a role that the profile assumes, arn:aws:iam",
        "container": "container's or pod's agent",
        "instance": "instance's role (IMDS)",
        "process": "credential_process",
    }
    said = check_of(found, "credentials").detail
    assert named[way] in said
    assert said.startswith(keys.access[:2])
    assert (", until 20" in said) == (way not in ("environment", "shared_file", "named_profile"))
    assert keys.secret not in everything(found)
    assert keys.access not in everything(found)
    assert not keys.token or keys.token not in everything(found)


def test_nobody_on_purpose(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    found = look(endpoint_url=store.url, anonymous=True)
    assert "anonymous is on" in check_of(found, "credentials").detail
    assert "unset `anonymous`" in str(check_of(found, "list").remedy), "this store wants signatures"


def test_tls_says_who_vouches(
    secure_store: Callable[[Certificates], ObjectServer], certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))
    url = secure_store(certificates).url
    found = look(endpoint_url=url)
    assert found.ok, everything(found)
    assert "certificate of test authority until 20" in check_of(found, "tls").detail
    assert check_of(found, "ca_bundle").detail == f"{certificates.authority}, from AWS_CA_BUNDLE"
    with Proxy("user:secret") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@127.0.0.1:{proxy.port}")
        found = look(endpoint_url=url)
        assert found.ok, everything(found)
        assert {line.split(" ")[0] for line in proxy.seen} == {"CONNECT"}
    assert check_of(found, "proxy").detail == f"http://127.0.0.1:{proxy.port} with a password, from HTTPS_PROXY"
    assert "secret@" not in everything(found)


def test_without_verification_there_is_a_warning(
    secure_store: Callable[[Certificates], ObjectServer], certificates: Certificates
) -> None:
    found = look(endpoint_url=secure_store(certificates).url, tls_verify=False)
    assert found.ok
    assert "tls_verify is off" in check_of(found, "ca_bundle").detail
    assert check_of(found, "ca_bundle").remedy is not None


# -- why: what decided each setting, held against what was used ------------------------------------------


@pytest.mark.parametrize(
    "how", ["option", "S3STREAM_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "services", "profile"]
)
def test_which_endpoint_and_why(store: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str) -> None:
    """Those that come later are set too, to somewhere else, so that who says the wrong one reaches nothing."""
    ways = ["option", "S3STREAM_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "services", "profile"]
    urls = dict.fromkeys(ways[ways.index(how) :], "http://127.0.0.1:1") | {how: store.url}
    for way in urls:
        if way.isupper():
            monkeypatch.setenv(way, urls[way])
    top = f"endpoint_url = {urls['profile']}\n" + ("services = mine\n" if "services" in urls else "")
    services = f"[services mine]\ns3 =\n  endpoint_url = {urls['services']}\n" if "services" in urls else ""
    (tmp_path / "config").write_text(f"[profile work]\n{top}{services}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    found = look(**({"endpoint_url": store.url} if how == "option" else {}))
    assert found.ok, everything(found)
    names = {
        "option": "the option endpoint_url",
        "services": "the services section mine of the profile work",
        "profile": "endpoint_url of the profile work",
    }
    assert check_of(found, "endpoint").detail == f"{store.url}, from {names.get(how, how)}"
    assert "keys in AWS_ACCESS_KEY_ID win" in str(check_of(found, "profile").remedy)


def test_which_region_and_why(store: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def said(**options: object) -> str:
        store.counters.authorization.clear()
        found = look(endpoint_url=store.url, **options)
        assert found.ok
        region = check_of(found, "region").detail.split(",")[0]
        assert any(f"/{region}/s3/" in sent for sent in store.counters.authorization)
        return f"{check_of(found, 'region').detail} {check_of(found, 'region').remedy or ''}".strip()

    assert said().startswith("us-east-1, by default")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert "AWS_REGION=eu-north-1 is not read; set AWS_DEFAULT_REGION" in said()
    (tmp_path / "config").write_text("[profile work]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert said() == "eu-west-3, from the profile work"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-2")
    assert said() == "eu-west-2, from AWS_DEFAULT_REGION"
    monkeypatch.setenv("S3STREAM_REGION", "eu-west-1")
    assert said() == "eu-west-1, from S3STREAM_REGION"
    assert said(region="us-west-2") == "us-west-2, from the option region"


def test_a_region_that_was_followed(store: ObjectServer) -> None:
    def elsewhere(request: Request, response: Response) -> Response | None:
        if "/us-east-1/" not in request.headers.get("authorization", ""):
            return None
        return error_response(400, "AuthorizationHeaderMalformed", x_amz_bucket_region="eu-west-3")

    store.faults = [Fault(elsewhere, method="LIST", times=None)]
    found = look(endpoint_url=store.url)
    assert found.ok, everything(found)
    assert check_of(found, "list").detail.endswith("in eu-west-3")
    assert "set region=eu-west-3" in str(check_of(found, "list").remedy)


def test_addressing_and_proxy_and_why(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(endpoint_url=store.url)
    assert (
        check_of(found, "addressing").detail == f"path style: {store.url}/bucket, as botocore chooses for other stores"
    )
    assert check_of(found, "proxy").detail == "none"
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found = look(endpoint_url=store.url, addressing_style="path")
    assert found.ok
    assert check_of(found, "addressing").detail.endswith("from the option addressing_style")
    assert check_of(found, "proxy").detail == "none; HTTP_PROXY is set, but NO_PROXY exempts the host"


def test_aws_itself_is_described_without_being_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy refuses, so nothing leaves this machine."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    found = look(region="eu-west-1")
    assert failed(found) == ["connect"]
    assert check_of(found, "endpoint").detail == (
        "https://s3.eu-west-1.amazonaws.com, from AWS's rules for the bucket and the region"
    )
    assert check_of(found, "addressing").detail == (
        "virtual host: https://bucket.s3.eu-west-1.amazonaws.com/, as botocore chooses for AWS"
    )
    assert "the proxy 127.0.0.1:1" in check_of(found, "connect").detail


# -- the command ---------------------------------------------------------------------------------------


def run(*arguments: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "s3stream"), "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    return done


def test_the_command(server: ObjectServer) -> None:
    put_model(server)
    document = json.loads(run("s3://bucket/m", "--endpoint-url", server.url, "--json", "--quiet").stdout)
    assert document["ok"] is True
    assert document["url"] == "s3://bucket/m/"
    assert {tuple(check) for check in document["checks"]} == {("name", "ok", "detail", "remedy", "seconds")}
    text = run("s3://bucket/m", "--endpoint-url", server.url).stdout
    assert "ready to load, 0 with a warning" in text
    server.faults = [Fault(lambda *_: error_response(403, "AccessDenied"), method="LIST", times=None)]
    done = run("s3://bucket/m", "--endpoint-url", server.url, code=5)
    assert "FAIL  list" in done.stdout
    assert "-> the identity needs s3:ListBucket" in done.stdout
    assert "1 failed" in done.stdout
    assert ACCESS_KEY not in done.stdout
    server.close()
    document = json.loads(run("s3://bucket/m", "--endpoint-url", server.url, "--json", code=6).stdout)
    assert document["ok"] is False
    assert [check["ok"] for check in document["checks"] if check["name"] == "list"] == [None]
    assert (
        "known options" in run("x", "-o", "nope=1", code=2).stderr
        or "did you mean" in run("x", "-o", "nope=1", code=2).stderr
    )
