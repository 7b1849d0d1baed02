"""Each way to credentials, set up as an administrator would: files, variables, a service on loopback."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.credentials.services import (
    ROLE_ARN,
    Answer,
    Call,
    Issuer,
    Keys,
    Service,
    container_agent,
    instance_metadata,
    serve,
    sso_portal,
    sts,
    temporary,
)

BEARER, WEB_TOKEN, AGENT_TOKEN = "sso/bearer", "web.identity.token", "pod.identity.token"


@dataclass
class Setup:
    """Where a way may write, and what it leaves behind.

    Attributes:
        issue: hands out the credentials of those ways that can hand out several.
        options: for `StreamConfig`.
        service: the stand-in, for those ways that have one.
    """

    patch: pytest.MonkeyPatch
    folder: Path
    stack: ExitStack
    issue: Issuer
    options: dict[str, object] = field(default_factory=dict)
    service: Service | None = None

    def serve(self, answer: Callable[[Call], Answer]) -> Service:
        self.service = self.stack.enter_context(serve(answer))
        return self.service

    def write_config(self, text: str) -> None:
        (self.folder / "config").write_text(text)
        self.patch.setenv("AWS_CONFIG_FILE", str(self.folder / "config"))

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


#: Applies a way and returns the credentials that every request must then carry.
Way = Callable[[Setup], Keys]


def environment(setup: Setup) -> Keys:
    keys = Keys("AKIAENV", "environment/secret", "environment/token==")
    setup.patch.setenv("AWS_ACCESS_KEY_ID", keys.access)
    setup.patch.setenv("AWS_SECRET_ACCESS_KEY", keys.secret)
    setup.patch.setenv("AWS_SESSION_TOKEN", keys.token or "")
    return keys


def shared_file(setup: Setup) -> Keys:
    keys = Keys("AKIAFILE", "file/secret")
    path = setup.write("credentials", _section("default", keys))
    setup.patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    return keys


def named_profile(setup: Setup) -> Keys:
    """The option names a profile, which wins over keys in the environment, as ``--profile`` does elsewhere."""
    environment(setup)
    keys = Keys("AKIAPROFILE", "profile/secret", "profile/token==")
    path = setup.write("credentials", _section("default", Keys("AKIAOTHER", "x")) + _section("mine", keys))
    setup.patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    setup.patch.delenv("AWS_SESSION_TOKEN")
    setup.options["profile"] = "mine"
    return keys


def sso(setup: Setup) -> Keys:
    log_in(setup, timedelta(hours=8))
    portal = setup.serve(sso_portal(setup.issue, BEARER))
    setup.patch.setenv("AWS_ENDPOINT_URL_SSO", portal.url)
    return temporary()


def log_in(setup: Setup, remaining: timedelta) -> None:
    """Leave behind what ``aws sso login`` does."""
    for provider in ("tokens.SSOTokenProvider", "credentials.SSOProvider"):
        # botocore settled this for good when it was imported, long before this test had a home folder.
        setup.patch.setattr(f"botocore.{provider}._SSO_TOKEN_CACHE_DIR", str(setup.folder / ".aws/sso/cache"))
    setup.patch.setenv("AWS_PROFILE", "work")
    setup.write_config(
        "[profile work]\nsso_session = corp\nsso_account_id = 123456789012\nsso_role_name = reader\n"
        "[sso-session corp]\nsso_region = eu-west-1\nsso_start_url = https://corp.example/start\n"
    )
    until = (datetime.now(UTC) + remaining).strftime("%Y-%m-%dT%H:%M:%SZ")
    token = {
        "startUrl": "https://corp.example/start",
        "region": "eu-west-1",
        "accessToken": BEARER,
        "expiresAt": until,
    }
    setup.write(f".aws/sso/cache/{hashlib.sha1(b'corp').hexdigest()}.json", json.dumps(token))


def web_identity(setup: Setup) -> Keys:
    """As EKS does it for service accounts (IRSA)."""
    path = setup.write("web-token", WEB_TOKEN)
    setup.patch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(path))
    setup.patch.setenv("AWS_ROLE_ARN", ROLE_ARN)
    service = setup.serve(sts(setup.issue, web_token=path.read_text))
    setup.patch.setenv("AWS_ENDPOINT_URL_STS", service.url)
    return temporary()


def assumed_role(setup: Setup) -> Keys:
    setup.write_config(
        f"[profile base]\naws_access_key_id = AKIABASE\naws_secret_access_key = base/secret\n"
        f"[profile reader]\nrole_arn = {ROLE_ARN}\nsource_profile = base\n"
    )
    setup.options["profile"] = "reader"
    service = setup.serve(sts(setup.issue))
    setup.patch.setenv("AWS_ENDPOINT_URL_STS", service.url)
    return temporary()


def container(setup: Setup) -> Keys:
    """As EKS Pod Identity does it."""
    path = setup.write("pod-token", AGENT_TOKEN)
    service = setup.serve(container_agent(setup.issue, path.read_text))
    setup.patch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.url}/v1/credentials")
    setup.patch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(path))
    return temporary()


def instance(setup: Setup) -> Keys:
    service = setup.serve(instance_metadata(setup.issue))
    setup.patch.delenv("AWS_EC2_METADATA_DISABLED")
    setup.patch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
    return temporary()


def process(setup: Setup) -> Keys:
    keys = temporary()
    run_process(setup, [keys])
    return keys


def run_process(setup: Setup, keys: list[Keys]) -> Path:
    """Configure a ``credential_process`` that prints the sets one after the other; returns its log of runs."""
    log = setup.write("runs", "")
    document = [[each.access, each.secret, each.token, each.lifetime_seconds] for each in keys]
    script = setup.write(
        "helper.py",
        "import datetime, json, pathlib\n"
        f"log, keys = pathlib.Path({str(log)!r}), {document!r}\n"
        "with log.open('a') as file: file.write('.')\n"
        "access, secret, token, seconds = keys[min(log.stat().st_size, len(keys)) - 1]\n"
        "until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': access, 'SecretAccessKey': secret,\n"
        "                  'SessionToken': token, 'Expiration': until.isoformat()}))\n",
    )
    setup.write_config(f"[default]\ncredential_process = {sys.executable} -S {script}\n")
    return log


def _section(name: str, keys: Keys) -> str:
    token = f"aws_session_token = {keys.token}\n" if keys.token else ""
    return f"[{name}]\naws_access_key_id = {keys.access}\naws_secret_access_key = {keys.secret}\n{token}"


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        environment,
        shared_file,
        named_profile,
        sso,
        web_identity,
        assumed_role,
        container,
        instance,
        process,
    )
}
#: Those behind which a service stands that can be asked again.
RENEWABLE = ("sso", "web_identity", "assumed_role", "container", "instance")


def no_credentials(patch: pytest.MonkeyPatch) -> None:
    """Take away the keys that `tests.conftest` gives every test."""
    patch.delenv("AWS_ACCESS_KEY_ID")
    patch.delenv("AWS_SECRET_ACCESS_KEY")
