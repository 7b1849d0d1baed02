"""Broken set-ups, each with real servers: the doctor names the check, the cause and the remedy."""

from __future__ import annotations

import email.utils
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from streamer.cli.exit_codes import exit_code
from streamer.doctor import Diagnosis
from tests.certificates import Certificates, expire, make_certificates
from tests.credentials.services import Answer, sts_error
from tests.credentials.ways import Setup, log_in, no_credentials, web_identity
from tests.doctor.looking import check_of, everything, failed, look
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.servers.proxy import Proxy

Start = Callable[[Certificates], ObjectServer]
SECRET = "SECRETEXAMPLE"  # that tests.conftest puts into the environment


def assert_names(found: Diagnosis, check: str, detail: str, remedy: str, code: int) -> None:
    """The first failure is `check`, whose words say both, and whose exit code is this."""
    assert failed(found), found
    first = check_of(found, failed(found)[0])
    assert first.name == check, everything(found)
    assert re.search(detail, first.detail), first.detail
    assert first.remedy is not None
    assert re.search(remedy, first.remedy), first.remedy
    assert found.error is not None
    assert exit_code(found.error) == code
    assert all(each.remedy for each in found.checks if each.ok is False)
    assert SECRET not in everything(found)
    assert "Signature=" not in everything(found)


# -- the way to the store ------------------------------------------------------------------------------


def test_nothing_listens() -> None:
    found = look(endpoint_url="http://127.0.0.1:1")
    assert_names(found, "connect", "127.0.0.1:1: Connection refused", "host and port in endpoint_url", 6)
    assert check_of(found, "credentials").ok, "which does not need the store"
    assert check_of(found, "list").ok is None
    assert check_of(found, "list").detail == "needs connect"


def test_no_such_host() -> None:
    found = look(endpoint_url="http://store.invalid:9000")
    assert_names(found, "dns", "store.invalid has no address", "endpoint_url", 6)


def test_a_web_page_is_no_store(setup: Setup) -> None:
    page = "<!doctype html><html><title>MinIO Console</title></html>"
    service = setup.serve(lambda call: Answer(200, page, "text/html"))
    found = look(endpoint_url=service.url)
    assert_names(found, "store", "web page .'minio console'", "S3 API, not of its console", 6)


def test_http_for_a_store_that_speaks_tls(secure_store: Start, certificates: Certificates) -> None:
    store = secure_store(certificates)
    found = look(endpoint_url=store.url.replace("https", "http"))
    assert_names(found, "store", "speaks TLS, and the endpoint says http", "write https://", 6)


def test_https_for_a_store_that_does_not_speak_tls(moto_url: str) -> None:
    found = look(endpoint_url=moto_url.replace("http", "https"))
    assert_names(found, "tls", "speaks plain HTTP, and the endpoint says https", "write http://", 6)


def test_an_endpoint_without_a_scheme() -> None:
    found = look(endpoint_url="127.0.0.1:9000")
    assert_names(found, "endpoint", "from the option endpoint_url", "http://host:port", 2)


def test_an_unknown_authority(secure_store: Start, certificates: Certificates) -> None:
    found = look(endpoint_url=secure_store(certificates).url)
    assert_names(found, "tls", "authority is unknown here.*issued by test authority", "ca_bundle or AWS_CA_BUNDLE", 6)


def test_an_expired_certificate(secure_store: Start, folder: Path) -> None:
    made = make_certificates(folder)
    expire(made, days=2)
    found = look(endpoint_url=secure_store(made).url, ca_bundle=str(made.authority))
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 2 * 86400))
    assert_names(found, "tls", f"has expired.*ends on {day}", "renew", 6)


def test_a_certificate_of_another_host(secure_store: Start, folder: Path) -> None:
    made = make_certificates(folder, name="DNS:elsewhere.example")
    found = look(endpoint_url=secure_store(made).url, ca_bundle=str(made.authority))
    assert_names(found, "tls", "is for another host", "host that the certificate names in endpoint_url", 6)


def test_a_bundle_that_is_missing(secure_store: Start, certificates: Certificates, tmp_path: Path) -> None:
    found = look(endpoint_url=secure_store(certificates).url, ca_bundle=str(tmp_path / "nowhere.pem"))
    assert_names(found, "ca_bundle", "nowhere.pem cannot be used: No such file", "PEM", 2)


def test_a_proxy_that_is_not_there(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:hunter2@127.0.0.1:1")
    found = look(endpoint_url=store.url)
    assert_names(found, "connect", "the proxy 127.0.0.1:1: Connection refused", "HTTP_PROXY.*NO_PROXY", 6)
    assert "hunter2" not in everything(found)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_wants_a_password(
    store: ObjectServer,
    secure_store: Start,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
) -> None:
    url = store.url if scheme == "http" else secure_store(certificates).url
    with Proxy("user:other") as proxy:
        monkeypatch.setenv(f"{scheme}_proxy", f"http://user:hunter2@127.0.0.1:{proxy.port}")
        found = look(endpoint_url=url, ca_bundle=str(certificates.authority))
    check = "store" if scheme == "http" else "connect"
    assert_names(found, check, f"proxy 127.0.0.1:{proxy.port} wants to know who we are.*407", f"{scheme}_proxy", 6)
    assert "hunter2" not in everything(found)


def test_a_proxy_that_speaks_tls(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "https://user:hunter2@127.0.0.1:1")
    found = look(endpoint_url=store.url)
    assert_names(found, "proxy", "needs https, which the native reader", "transport=sdk", 2)
    assert "hunter2" not in everything(found)


@pytest.mark.parametrize("has_address", [True, False])
def test_virtual_hosts_where_there_are_none(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, has_address: bool
) -> None:
    """Whether names below localhost have addresses is the resolver's choice."""
    real = socket.getaddrinfo

    def resolve(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "bucket.localhost" and not has_address:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1" if host == "bucket.localhost" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    found = look(endpoint_url=store.url.replace("127.0.0.1", "localhost"), addressing_style="virtual")
    if has_address:
        assert_names(found, "list", "no such bucket", "addressing_style=path", 4)
    else:
        assert_names(found, "dns", "bucket.localhost has no address", "addressing_style=path", 6)


def test_a_proxy_that_only_the_sdk_speaks_to(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "https://user:hunter2@127.0.0.1:1")
    found = look(endpoint_url=store.url, transport="sdk")
    assert_names(found, "list", "proxy", "proxy settings", 6)
    assert check_of(found, "proxy").detail == "https://127.0.0.1:1, from http_proxy; only the SDK speaks it"
    assert check_of(found, "connect").ok is None
    assert "hunter2" not in everything(found)


# -- who we are ----------------------------------------------------------------------------------------


def test_no_credentials(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    no_credentials(monkeypatch)
    found = look(endpoint_url=store.url)
    assert_names(found, "credentials", "no credentials were found", "anonymous=true", 5)
    assert check_of(found, "list").detail == "needs credentials"


def test_no_such_profile(store: ObjectServer) -> None:
    found = look(endpoint_url=store.url, profile="nobody")
    assert_names(found, "profile", "nobody", "AWS_PROFILE or the option profile", 2)


def test_a_login_that_has_ended(store: ObjectServer, setup: Setup) -> None:
    log_in(setup, -timedelta(hours=1))
    assert_names(look(endpoint_url=store.url), "credentials", "expired", "aws sso login", 5)


def test_a_role_that_refuses(store: ObjectServer, setup: Setup) -> None:
    web_identity(setup)
    service = setup.serve(lambda _: sts_error(403, "AccessDenied", "not you"))
    setup.patch.setenv("AWS_ENDPOINT_URL_STS", service.url)
    found = look(endpoint_url=store.url)
    assert_names(found, "credentials", "AssumeRoleWithWebIdentity was refused", "trust policy", 5)


def test_the_variable_that_redirects_sts_too(store: ObjectServer, setup: Setup) -> None:
    web_identity(setup)
    setup.patch.delenv("AWS_ENDPOINT_URL_STS")
    setup.patch.setenv("AWS_ENDPOINT_URL", store.url)
    found = look()
    assert_names(found, "credentials", "AssumeRoleWithWebIdentity", "set AWS_ENDPOINT_URL_S3", 5)
    assert "AWS_ENDPOINT_URL_S3" in str(check_of(found, "endpoint").remedy)


def test_a_clock_that_is_wrong(store: ObjectServer) -> None:
    def skewed(request: Request, response: Response) -> Response:
        date = email.utils.formatdate(time.time() - 3600, usegmt=True)
        return error_response(403, "RequestTimeTooSkewed", "too large", Date=date)

    store.faults = [Fault(skewed, method="LIST", times=None)]
    found = look(endpoint_url=store.url)
    assert_names(found, "clock", r"36\d\d s ahead of the store's", "set this machine's clock", 5)
    assert failed(found) == ["clock", "list"]
    assert check_of(found, "list").remedy == "set this machine's clock"


def refusing(status: int, code: str, message: str = "because", **headers: str) -> Callable[..., Response]:
    return lambda request, response: error_response(status, code, message, **headers)


@pytest.mark.parametrize(
    ("refusal", "detail", "remedy", "code"),
    [
        (refusing(400, "ExpiredToken"), "credentials have expired", "log in again or refresh", 5),
        (refusing(403, "SignatureDoesNotMatch"), "SignatureDoesNotMatch", "the secret key does not belong", 5),
        (refusing(403, "InvalidAccessKeyId"), "InvalidAccessKeyId", "the store does not know this access key", 5),
        (refusing(403, "AccessDenied"), "access denied", r"needs s3:ListBucket on the bucket for the prefix 'm/'", 5),
        (refusing(403, "AccessDenied"), "access denied", "where the requester pays requester_pays=true", 5),
        (
            refusing(
                403, "AccessDenied", "not authorized because no VPC endpoint policy allows the s3:ListBucket action"
            ),
            "no VPC endpoint policy",
            "policy of the VPC endpoint must allow s3:ListBucket",
            5,
        ),
        (
            refusing(403, "AccessDenied", "with an explicit deny in a service control policy"),
            "service control policy",
            "a policy denies s3:ListBucket on the bucket for the prefix 'm/' here explicitly",
            5,
        ),
        (
            refusing(301, "PermanentRedirect", x_amz_bucket_region="eu-west-3"),
            "another region",
            "set region=eu-west-3",
            6,
        ),
        (
            refusing(400, "AuthorizationHeaderMalformed", x_amz_bucket_region="eu-west-4"),
            "another region",
            "set region=eu-west-4",
            6,
        ),
        (refusing(503, "SlowDown"), "kept refusing.*2 attempts", "try later", 6),
    ],
)
def test_a_refused_listing(
    store: ObjectServer, refusal: Callable[..., Response], detail: str, remedy: str, code: int
) -> None:
    store.faults = [Fault(refusal, method="LIST", times=None)]
    found = look(endpoint_url=store.url, region="us-west-2")
    assert_names(found, "list", detail, remedy, code)
    assert check_of(found, "store").ok, "it is S3 that refuses"


# -- what we may do ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no*bucket", "x"])
def test_a_name_that_no_bucket_can_have(store: ObjectServer, name: str) -> None:
    found = look(f"s3://{name}/m", endpoint_url=store.url)
    assert failed(found)[0] in {"endpoint", "list"}
    assert all(check.remedy for check in found.checks if check.ok is False)


def test_no_such_bucket(store: ObjectServer) -> None:
    assert_names(look("s3://other/m", endpoint_url=store.url), "list", "no such bucket", "check the URL", 4)


def test_nothing_under_the_prefix(store: ObjectServer) -> None:
    found = look("s3://bucket/mm", endpoint_url=store.url)
    assert_names(found, "list", "no objects here", "check the bucket and the prefix", 4)
    store.put("bucket", "mmm/x", b"x")
    assert "there is s3://bucket/mmm/" in str(check_of(look("s3://bucket/mm", endpoint_url=store.url), "list").remedy)


def test_reading_without_listing(store: ObjectServer) -> None:
    """A load of the folder fails, of a single file does not; so the doctor goes on as far as it can."""
    store.faults = [Fault(refusing(403, "AccessDenied"), method="LIST", times=None)]
    found = look(endpoint_url=store.url)
    assert_names(found, "list", "access denied", "s3:ListBucket on the bucket for the prefix 'm/'", 5)
    assert failed(found) == ["list"]
    assert check_of(found, "head").detail.startswith("model.safetensors: ")
    assert check_of(found, "read").ok
    assert look("s3://bucket/m/model.safetensors", endpoint_url=store.url).ok


def test_listing_without_reading(store: ObjectServer) -> None:
    store.faults = [Fault(refusing(403, "AccessDenied"), method=kind, times=None) for kind in ("HEAD", "GET")]
    found = look(endpoint_url=store.url)
    assert_names(found, "head", "access denied", "needs s3:GetObject", 5)
    assert failed(found) == ["head"]


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (refusing(400, "KMS.DisabledException"), "kms:Decrypt.*enabled"),
        (refusing(403, "AccessDenied", "not authorized to perform: kms:Decrypt"), "kms:Decrypt"),
        (refusing(403, "AccessDenied"), "needs s3:GetObject here"),
        (refusing(403, "InvalidObjectState"), "restore it"),
    ],
)
def test_a_refused_read(store: ObjectServer, refusal: Callable[..., Response], remedy: str) -> None:
    store.faults = [Fault(refusal, times=None)]
    found = look(endpoint_url=store.url)
    assert_names(found, "read", "m/model.safetensors bytes", remedy, 5)
    assert check_of(found, "throughput").ok is None


def test_a_store_that_ignores_ranges(store: ObjectServer) -> None:
    def whole(request: Request, response: Response) -> Response:
        body = store.objects["bucket"][request.key].content
        assert isinstance(body, bytes)
        return Response(200, {"Content-Length": str(len(body))}, body, 0, len(body))

    store.faults = [Fault(whole, times=None)]
    found = look(endpoint_url=store.url)
    assert_names(found, "read", "ignored the range and sent the whole object", "stands between", 6)


@pytest.mark.parametrize("names_etag", [True, False])
def test_a_store_that_ignores_if_match(store: ObjectServer, names_etag: bool) -> None:
    """That is no failure, but deserves to be known."""

    def blind(request: Request, response: Response) -> Response:
        request.headers.pop("if-match", None)
        right = store.route(request)
        if not names_etag:
            del right.headers["ETag"]
        return right

    store.faults = [Fault(blind, times=None)]
    found = look(endpoint_url=store.url)
    pin = check_of(found, "pin")
    assert found.ok
    assert "ignores If-Match" in pin.detail
    assert ("by which changes are noticed" in pin.detail) == names_etag
    assert pin.remedy is not None


def test_a_checkpoint_that_is_none(store: ObjectServer) -> None:
    store.put("bucket", "m/model.safetensors", b"\x00" * 5000)
    found = look(endpoint_url=store.url)
    assert_names(found, "checkpoint", "m/model.safetensors", ".", 3)
    assert check_of(found, "throughput").ok is not None


def test_a_url_that_is_none() -> None:
    assert_names(look("s3://AKIA:hunter2@bucket/m"), "url", "no place for keys", "s3://bucket/folder", 2)
    assert "hunter2" not in everything(look("s3://AKIA:hunter2@bucket/m"))
