"""Every way to credentials that botocore knows, through its own resolution: list, head and bodies alike."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from streamer.errors import ConfigError, CredentialsError, SourceUnavailableError
from tests.credentials.reading import PIECES, visit_once
from tests.credentials.services import ROLE_ARN, Answer, Guard, instance_metadata, sts, sts_error
from tests.credentials.ways import (
    AGENT_TOKEN,
    RENEWABLE,
    WAYS,
    WEB_TOKEN,
    Setup,
    assumed_role,
    container,
    environment,
    instance,
    log_in,
    shared_file,
    sso,
    web_identity,
)
from tests.servers.object_server import ObjectServer
from tests.servers.proxy import Proxy


@pytest.mark.parametrize("way", WAYS)
def test_every_request_carries_the_credentials(
    server: ObjectServer, guard: Guard, setup: Setup, transport: str, way: str
) -> None:
    keys = WAYS[way](setup)
    visit_once(server, transport=transport, **setup.options)
    assert [method for method, _ in guard.seen] == ["LIST", "HEAD", "HEAD"] + ["GET"] * PIECES
    assert len(guard.methods_by(keys)) == len(guard.seen), guard.seen
    if way in RENEWABLE:
        assert setup.issue.issued == 1, "looked up once, for list, head and bodies together"


def test_anonymous_signs_nothing_and_asks_nobody(setup: Setup, transport: str) -> None:
    environment(setup)
    instance(setup)
    with ObjectServer() as server:
        guard = Guard(server)
        server.put("bucket", "m/a.bin", bytes(range(256)) * 2000)
        visit_once(server, transport=transport, anonymous=True)
    assert {signed.access for _, signed in guard.seen} == {None}
    assert setup.service is not None
    assert setup.service.calls == []


def test_profile_by_variable_and_default_by_none(server: ObjectServer, guard: Guard, setup: Setup) -> None:
    shared_file(setup)
    path = setup.folder / "credentials"
    path.write_text(path.read_text() + "[night]\naws_access_key_id = AKIANIGHT\naws_secret_access_key = night\n")
    visit_once(server)
    setup.patch.setenv("AWS_PROFILE", "night")
    visit_once(server)
    assert list(dict.fromkeys(signed.access for _, signed in guard.seen)) == ["AKIAFILE", "AKIANIGHT"]


def test_web_identity_shows_its_token_to_sts_and_to_nobody_else(
    server: ObjectServer, guard: Guard, setup: Setup
) -> None:
    web_identity(setup)
    visit_once(server)
    assert setup.service is not None
    (call,) = setup.service.calls
    assert f"WebIdentityToken={WEB_TOKEN}" in call.body
    assert "authorization" not in call.headers
    assert not any(WEB_TOKEN in sent for sent in server.counters.authorization)


def test_sts_is_asked_in_the_region_of_the_option(server: ObjectServer, guard: Guard, setup: Setup) -> None:
    keys = assumed_role(setup)
    visit_once(server, region="eu-west-3", **setup.options)
    assert guard.methods_by(keys)
    assert setup.service is not None
    (call,) = setup.service.calls
    assert "/eu-west-3/sts/" in call.headers["authorization"]


def test_the_endpoint_option_leaves_sts_where_it_is(
    server: ObjectServer, guard: Guard, setup: Setup, transport: str
) -> None:
    """Without a variable for STS, the request for a role leaves for AWS: a proxy on loopback stops it there."""
    web_identity(setup)
    setup.patch.delenv("AWS_ENDPOINT_URL_STS")
    with Proxy("nobody:may pass") as proxy:
        setup.patch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        setup.patch.setenv("AWS_REGION", "eu-west-1")
        setup.patch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
        with pytest.raises(SourceUnavailableError):
            visit_once(server, transport=transport)
    assert {line.split(" ")[1] for line in proxy.seen} == {"sts.eu-west-1.amazonaws.com:443"}
    assert guard.seen == []


def test_the_endpoint_option_leaves_sso_where_it_is(server: ObjectServer, guard: Guard, setup: Setup) -> None:
    sso(setup)
    setup.patch.delenv("AWS_ENDPOINT_URL_SSO")
    with Proxy("nobody:may pass") as proxy:
        setup.patch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(SourceUnavailableError):
            visit_once(server)
    assert {line.split(" ")[1] for line in proxy.seen} == {"portal.sso.eu-west-1.amazonaws.com:443"}
    assert guard.seen == []


def test_the_variable_for_all_services_is_diagnosed(server: ObjectServer, guard: Guard, setup: Setup) -> None:
    """AWS_ENDPOINT_URL sends STS to the store too, which knows no roles."""
    web_identity(setup)
    setup.patch.delenv("AWS_ENDPOINT_URL_STS")
    setup.patch.setenv("AWS_ENDPOINT_URL", server.url)
    with pytest.raises(CredentialsError, match="AssumeRoleWithWebIdentity.*AWS_ENDPOINT_URL.*AWS_ENDPOINT_URL_S3"):
        visit_once(server, endpoint_url=None)
    setup.patch.delenv("AWS_ENDPOINT_URL")
    setup.patch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    assert setup.service is not None
    setup.patch.setenv("AWS_ENDPOINT_URL_STS", setup.service.url)
    guard.seen.clear()
    visit_once(server, endpoint_url=None)
    assert guard.seen


@pytest.mark.parametrize("metadata", ["disabled", "unreachable", "no role"])
def test_no_credentials_anywhere(
    server: ObjectServer, guard: Guard, setup: Setup, transport: str, metadata: str
) -> None:
    if metadata != "disabled":
        setup.patch.delenv("AWS_EC2_METADATA_DISABLED")
        service = setup.serve(instance_metadata(None))
        url = service.url if metadata == "no role" else "http://127.0.0.1:1"
        setup.patch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
    began = time.monotonic()
    with pytest.raises(CredentialsError) as caught:
        visit_once(server, transport=transport)
    assert time.monotonic() - began < 5
    text = str(caught.value)
    assert text.startswith("s3://bucket/m/: no credentials were found")
    for word in ("environment", "profile", "SSO", "web identity", "container", "instance", "anonymous=true"):
        assert word in text
    assert guard.seen == []


def _half_a_pair(setup: Setup) -> str:
    setup.patch.setenv("AWS_ACCESS_KEY_ID", "AKIAHALF")
    return "AWS_SECRET_ACCESS_KEY"


def _no_token_file(setup: Setup) -> str:
    web_identity(setup)
    (setup.folder / "web-token").unlink()
    return r"could not be had.*No such file.*web-token"


def _refused_role(setup: Setup) -> str:
    web_identity(setup)
    assert setup.service is not None
    service = setup.serve(lambda _: sts_error(403, "AccessDenied", "Not authorized to assume this role"))
    setup.patch.setenv("AWS_ENDPOINT_URL_STS", service.url)
    return (
        r"AssumeRoleWithWebIdentity was refused: Not authorized to assume this role "
        r"\[status 403, AccessDenied, request id STSREQUEST\] \(check .*trust policy"
    )


def _other_token(setup: Setup) -> str:
    web_identity(setup)
    setup.write("web-token", "")
    service = setup.serve(sts(setup.issue, web_token=lambda: WEB_TOKEN))
    setup.patch.setenv("AWS_ENDPOINT_URL_STS", service.url)
    return "credentials could not be had.*WebIdentityToken"


def _agent_refuses(setup: Setup) -> str:
    container(setup)
    setup.write("pod-token", AGENT_TOKEN + "?")
    assert setup.service is not None
    refusing = setup.serve(lambda _: Answer(403, '{"message": "no"}'))
    setup.patch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{refusing.url}/v1/credentials")
    return "credentials could not be had"


def _no_agent_token(setup: Setup) -> str:
    container(setup)
    (setup.folder / "pod-token").unlink()
    return "credentials could not be had.*No such file.*pod-token"


def _sso_expired(setup: Setup) -> str:
    sso(setup)
    log_in(setup, -timedelta(hours=1))
    return "Token has expired.*aws sso login"


def _sso_logged_out(setup: Setup) -> str:
    sso(setup)
    for path in (setup.folder / ".aws/sso/cache").iterdir():
        path.unlink()
    return "SSO.*aws sso login"


def _sso_refused(setup: Setup) -> str:
    sso(setup)
    service = setup.serve(lambda _: Answer(401, '{"message": "Session token not found or invalid"}'))
    setup.patch.setenv("AWS_ENDPOINT_URL_SSO", service.url)
    return "aws sso login"


def _helper(setup: Setup, code: str) -> None:
    script = setup.write("helper.py", code)
    setup.write_config(f"[default]\ncredential_process = {sys.executable} -S {script}\n")


def _helper_fails(setup: Setup) -> str:
    _helper(setup, "import sys; sys.exit('vault is sealed')")
    return "vault is sealed"


def _helper_prints_prose(setup: Setup) -> str:
    _helper(setup, "print('please log in')")
    return "could not be had.*JSON"


def _helper_forgets_a_key(setup: Setup) -> str:
    _helper(setup, "print('{\"Version\": 1}')")
    return "AccessKeyId"


def _helper_is_missing(setup: Setup) -> str:
    setup.write_config("[default]\ncredential_process = /nowhere/helper --please\n")
    return "could not be had.*No such file.*/nowhere/helper"


def _role_without_source(setup: Setup) -> str:
    setup.write_config(f"[profile reader]\nrole_arn = {ROLE_ARN}\n")
    setup.options["profile"] = "reader"
    return "source_profile"


BROKEN: dict[str, Callable[[Setup], str]] = {
    way.__name__.removeprefix("_").replace("_", " "): way
    for way in (
        _half_a_pair,
        _no_token_file,
        _refused_role,
        _other_token,
        _agent_refuses,
        _no_agent_token,
        _sso_expired,
        _sso_logged_out,
        _sso_refused,
        _helper_fails,
        _helper_prints_prose,
        _helper_forgets_a_key,
        _helper_is_missing,
        _role_without_source,
    )
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_way_says_what_is_broken(server: ObjectServer, guard: Guard, setup: Setup, name: str) -> None:
    words = BROKEN[name](setup)
    with pytest.raises(CredentialsError) as caught:
        visit_once(server, **setup.options)
    text = str(caught.value)
    assert re.search(words, text), text
    assert guard.seen == [], "the store is not asked without credentials"


def test_a_profile_that_does_not_exist_is_a_setting_not_a_credential(server: ObjectServer, setup: Setup) -> None:
    setup.patch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="no profile 'nobody'"):
        visit_once(server)
