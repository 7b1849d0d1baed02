"""Stand-ins on loopback for the services that hand out credentials, and what a store makes of a signature."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, parse_qsl, quote
from xml.sax.saxutils import escape

from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response

ROLE_ARN = "arn:aws:iam::123456789012:role/reader"


@dataclass(frozen=True)
class Keys:
    """One set of credentials; `lifetime_seconds` is only told to the client."""

    access: str
    secret: str
    token: str | None = None
    lifetime_seconds: float = 6 * 3600.0

    @property
    def expiration(self) -> str:
        until = datetime.now(UTC) + timedelta(seconds=self.lifetime_seconds)
        return until.strftime("%Y-%m-%dT%H:%M:%SZ")


def temporary(number: int = 1, lifetime_seconds: float = 6 * 3600.0) -> Keys:
    return Keys(f"ASIATEMP{number}", f"secret/of+{number}", f"token/of+{number}==", lifetime_seconds)


@dataclass(frozen=True)
class Call:
    """A request to a service."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: str


@dataclass(frozen=True)
class Answer:
    status: int
    body: str
    kind: str = "application/json"


@dataclass
class Service:
    """A running stand-in: where it is and what it was asked."""

    url: str
    calls: list[Call] = field(default_factory=list)


@contextmanager
def serve(answer: Callable[[Call], Answer]) -> Iterator[Service]:
    """Answer every request with ``answer(call)`` until the context is left."""
    service = Service("")
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            path, _, query = self.path.partition("?")
            headers = {name.lower(): value for name, value in self.headers.items()}
            call = Call(self.command, path, parse_qs(query), headers, body)
            with lock:
                service.calls.append(call)
                answered = answer(call)
            content = answered.body.encode()
            self.send_response(answered.status)
            self.send_header("Content-Type", answered.kind)
            self.send_header("Content-Length", str(len(content)))
            if call.method == "PUT":
                self.send_header("x-aws-ec2-metadata-token-ttl-seconds", "21600")
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Issuer:
    """Hands out the given sets one after the other, and the last one for ever."""

    def __init__(self, *keys: Keys) -> None:
        self._keys = keys
        self.issued = 0

    def __call__(self) -> Keys:
        keys = self._keys[min(self.issued, len(self._keys) - 1)]
        self.issued += 1
        return keys


def sts(issue: Callable[[], Keys], *, web_token: Callable[[], str] | None = None) -> Callable[[Call], Answer]:
    """STS: AssumeRole, and AssumeRoleWithWebIdentity for whoever shows the token that is valid now."""

    def answer(call: Call) -> Answer:
        form = parse_qs(call.body)
        action = form["Action"][0]
        if call.method != "POST" or form.get("RoleArn") != [ROLE_ARN]:
            return sts_error(403, "AccessDenied", "no such role")
        if web_token is not None and form.get("WebIdentityToken") != [web_token()]:
            return sts_error(400, "InvalidIdentityToken", "the token is not valid")
        if web_token is None and "authorization" not in call.headers:
            return sts_error(403, "MissingAuthenticationToken", "sign the request")
        keys = issue()
        return Answer(
            200,
            f"<{action}Response><{action}Result><Credentials><AccessKeyId>{keys.access}</AccessKeyId>"
            f"<SecretAccessKey>{keys.secret}</SecretAccessKey><SessionToken>{keys.token}</SessionToken>"
            f"<Expiration>{keys.expiration}</Expiration></Credentials><AssumedRoleUser>"
            f"<Arn>{ROLE_ARN}/x</Arn><AssumedRoleId>AROA:x</AssumedRoleId></AssumedRoleUser>"
            f"</{action}Result></{action}Response>",
            "text/xml",
        )

    return answer


def sts_error(status: int, code: str, message: str) -> Answer:
    body = f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    return Answer(status, f"{body}<RequestId>STSREQUEST</RequestId></ErrorResponse>", "text/xml")


def sso_portal(issue: Callable[[], Keys], bearer: str) -> Callable[[Call], Answer]:
    """GetRoleCredentials of the access portal, for whoever is logged in."""

    def answer(call: Call) -> Answer:
        if call.headers.get("x-amz-sso_bearer_token") != bearer:
            return Answer(401, json.dumps({"message": "Session token not found or invalid"}))
        keys = issue()
        until = datetime.now(UTC) + timedelta(seconds=keys.lifetime_seconds)
        role = {
            "accessKeyId": keys.access,
            "secretAccessKey": keys.secret,
            "sessionToken": keys.token,
            "expiration": int(until.timestamp() * 1000),
        }
        return Answer(200, json.dumps({"roleCredentials": role}))

    return answer


def container_agent(issue: Callable[[], Keys], token: Callable[[], str]) -> Callable[[Call], Answer]:
    """EKS Pod Identity's agent."""

    def answer(call: Call) -> Answer:
        if call.headers.get("authorization") != token():
            return Answer(403, json.dumps({"message": "bad token"}))
        return Answer(200, json.dumps(_document(issue())))

    return answer


def instance_metadata(issue: Callable[[], Keys] | None) -> Callable[[Call], Answer]:
    """Instance metadata, version 2 only; None: an instance without a role."""
    session = "IMDS-SESSION"
    root = "/latest/meta-data/iam/security-credentials/"

    def answer(call: Call) -> Answer:
        if call.method == "PUT" and call.path == "/latest/api/token":
            return Answer(200, session, "text/plain")
        if call.headers.get("x-aws-ec2-metadata-token") != session:
            return Answer(401, "Unauthorized", "text/plain")
        if issue is None:
            return Answer(404, "Not Found", "text/plain")
        if call.path == root:
            return Answer(200, "node-role", "text/plain")
        if call.path == root + "node-role":
            return Answer(200, json.dumps({"Code": "Success", "Type": "AWS-HMAC", **_document(issue())}))
        return Answer(404, "Not Found", "text/plain")

    return answer


def _document(keys: Keys) -> dict[str, str | None]:
    return {
        "AccessKeyId": keys.access,
        "SecretAccessKey": keys.secret,
        "Token": keys.token,
        "Expiration": keys.expiration,
    }


# -- the store's side --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signed:
    """Who a request claims to come from; everything is None when it is unsigned."""

    access: str | None
    token: str | None
    signature: str | None
    expected: Callable[[str], str] = field(repr=False, compare=False)
    """From the secret key to the signature that would be right (AWS Signature Version 4)."""

    def is_by(self, keys: Keys) -> bool:
        return (self.access, self.token) == (keys.access, keys.token) and self.signature == self.expected(keys.secret)


def read_signature(request: Request) -> Signed:
    """Take a request's signature apart, wherever it is."""
    path, _, query = request.target.partition("?")
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    header = request.headers.get("authorization", "")
    fields = dict(part.strip().split("=", 1) for part in header.partition(" ")[2].split(",")) if header else {}
    if "X-Amz-Signature" in parameters:
        signature = parameters.pop("X-Amz-Signature")
        scope, names = parameters["X-Amz-Credential"], parameters["X-Amz-SignedHeaders"]
        moment, payload = parameters["X-Amz-Date"], "UNSIGNED-PAYLOAD"
        token = parameters.get("X-Amz-Security-Token")
    elif fields:
        signature, scope, names = fields["Signature"], fields["Credential"], fields["SignedHeaders"]
        moment, payload = request.headers["x-amz-date"], request.headers["x-amz-content-sha256"]
        token = request.headers.get("x-amz-security-token")
    else:
        return Signed(None, None, None, lambda _: "")
    access, date, region, service, end = scope.split("/")
    canonical = "\n".join(
        (
            request.method,
            path,
            "&".join(
                f"{quote(name, safe='-_.~')}={quote(parameters[name], safe='-_.~')}" for name in sorted(parameters)
            ),
            *(f"{name}:{request.headers[name]}" for name in names.split(";")),
            "",
            names,
            payload,
        )
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(("AWS4-HMAC-SHA256", moment, f"{date}/{region}/{service}/{end}", digest))

    def expected(secret: str) -> str:
        key = f"AWS4{secret}".encode()
        for part in (date, region, service, end):
            key = hmac.digest(key, part.encode(), "sha256")
        return hmac.digest(key, text.encode(), "sha256").hex()

    return Signed(access, token, signature, expected)


class Guard:
    """Watches an `ObjectServer`: records who asked for what, and refuses keys as expired.

    Attributes:
        seen: method and signature of every request.
        expired: access key ids that get ``ExpiredToken``.
    """

    def __init__(self, server: ObjectServer) -> None:
        self.seen: list[tuple[str, Signed]] = []
        self.expired: set[str] = set()
        server.faults += [Fault(self._watch(method), method=method, times=None) for method in ("LIST", "HEAD", "GET")]

    def _watch(self, method: str) -> Callable[[Request, Response], Response | None]:
        def watch(request: Request, response: Response) -> Response | None:
            signed = read_signature(request)
            self.seen.append((method, signed))
            if signed.access in self.expired:
                return error_response(400, "ExpiredToken", "The provided token has expired.")
            return None

        return watch

    def methods_by(self, keys: Keys) -> list[str]:
        """Return the methods of the requests that `keys` signed, in order."""
        return [method for method, signed in self.seen if signed.is_by(keys)]
