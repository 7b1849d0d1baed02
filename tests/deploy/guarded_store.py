"""moto with IAM enforced, and a guard before it that records every call of S3.

moto decides by action and resource, but looks at no condition of S3 and at no signature in a URL. The guard does both:
it refuses what the policy's conditions refuse, and signs presigned requests anew, with a header. A request must be
let through by both. It is a process of its own, because moto keeps what it enforces in module globals.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import boto3
from botocore.config import Config

from tests.deploy.iam import allows, call_of

__all__ = ["GuardedStore", "start_guarded_store"]

ROOT = Path(__file__).parent.parent.parent
ADMIN: dict[str, Any] = {"region_name": "us-east-1", "aws_access_key_id": "ADMIN", "aws_secret_access_key": "admin"}
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole"}],
}
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message><RequestId>guard</RequestId></Error>"

Environ = dict[str, Any]
Application = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class GuardedStore:
    url: str

    def admin(self, service: str) -> Any:
        """Return a client that may do everything, but only while nothing is enforced."""
        client: Any = boto3.client  # whose stubs know no service by a variable
        return client(service, endpoint_url=self.url, config=Config(proxies={}), **ADMIN)

    @contextmanager
    def enforcing(self, policy: Mapping[str, Any]) -> Iterator[dict[str, str]]:
        """Enforce `policy` for a role of its own; yields variables with the role's credentials."""
        iam, sts = self.admin("iam"), self.admin("sts")
        name = f"role-{len(iam.list_roles()['Roles'])}"
        arn = iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(_TRUST))["Role"]["Arn"]
        iam.put_role_policy(RoleName=name, PolicyName="policy", PolicyDocument=json.dumps(policy))
        found = sts.assume_role(RoleArn=arn, RoleSessionName="session")["Credentials"]
        keys = [found["AccessKeyId"], found["SecretAccessKey"], found["SessionToken"]]
        self._send("POST", "/guard", json.dumps({"policy": policy, "keys": keys}))
        self._send("POST", "/moto-api/reset-auth", "0")
        try:
            yield dict(zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"), keys, strict=True))
        finally:
            self._send("POST", "/moto-api/reset-auth", "inf")
            self._send("POST", "/guard", "null")

    def calls(self) -> list[tuple[str, str, str, bool]]:
        """Return the calls since the last time: operation, resource, ``s3:prefix``, whether the guard allowed it."""
        return [tuple(call) for call in json.loads(self._send("GET", "/guard"))]

    def _send(self, method: str, path: str, body: str | None = None) -> bytes:
        headers = {"Content-Type": "application/octet-stream"}  # as a form, moto would not find the body
        data = body.encode() if body else None
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as response:
            found: bytes = response.read()
            return found


@contextmanager
def start_guarded_store() -> Iterator[GuardedStore]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.deploy.guarded_store"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url, "the store did not start"
        yield GuardedStore(url)
    finally:
        process.terminate()
        process.wait(timeout=30)
        process.stdout.close()


@dataclass(slots=True)
class _Guard:
    behind: Application
    policy: dict[str, Any] | None = None
    keys: tuple[str, str, str] = ("", "", "")
    calls: list[tuple[str, str, str, bool]] = field(default_factory=list)

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/guard":
            return self._control(environ, start_response)
        if self.policy is None or path.startswith("/moto-api"):
            return self.behind(environ, start_response)
        query = dict(parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
        call = call_of(environ["REQUEST_METHOD"], path, {k: v for k, v in query.items() if not k.startswith("X-Amz-")})
        allowed = allows(self.policy, call)
        if "X-Amz-Signature" in query:
            allowed = allowed and self._sign_anew(environ, path, query)
        self.calls.append((call.name, call.resource, call.context.get("s3:prefix", ""), allowed))
        if not allowed:
            start_response("403 Forbidden", [("Content-Type", "text/xml"), ("Content-Length", str(len(_DENIED)))])
            return [b"" if environ["REQUEST_METHOD"] == "HEAD" else _DENIED]
        return self.behind(environ, start_response)

    def _control(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        answer = b""
        if environ["REQUEST_METHOD"] == "POST":
            order = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            self.policy = order and order["policy"]
            self.keys = tuple(order["keys"]) if order else ("", "", "")
        else:
            answer = json.dumps(self.calls).encode()
            self.calls.clear()
        start_response("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]

    def _sign_anew(self, environ: Environ, path: str, query: dict[str, str]) -> bool:
        """Move a signature from the URL to a header, if it is of the role's."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        access_key, secret_key, token = self.keys
        if query["X-Amz-Credential"].split("/")[0] != access_key or query["X-Amz-Security-Token"] != token:
            return False
        plain = urlencode({k: v for k, v in query.items() if not k.startswith("X-Amz-")})
        url = f"http://{environ['HTTP_HOST']}{quote(path)}?{plain}"
        request = AWSRequest(environ["REQUEST_METHOD"], url, headers={"Host": environ["HTTP_HOST"]})
        S3SigV4Auth(Credentials(access_key, secret_key, token), "s3", "us-east-1").add_auth(request)
        environ["QUERY_STRING"] = plain
        environ["RAW_URI"] = environ["REQUEST_URI"] = f"{quote(path)}?{plain}"
        environ.update({f"HTTP_{name.upper().replace('-', '_')}": value for name, value in request.headers.items()})
        return True


def _serve() -> None:
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    guard = _Guard(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, guard, threaded=True, request_handler=MotoRequestHandler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
