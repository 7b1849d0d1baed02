"""Makes an `ObjectServer` behave as a directory bucket (S3 Express One Zone) does: no request without a session.

https://docs.aws.amazon.com/AmazonS3/latest/API/API_CreateSession.html
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response

__all__ = ["Express"]


class Express:
    """Hands out sessions and insists on the last one; a new one ends those before.

    Args:
        life_seconds: of a session, as the client is told; `end_sessions` ends them sooner.

    Attributes:
        sessions: how many were created.
        prefixes: of the listings that were asked for.
    """

    def __init__(self, server: ObjectServer, *, life_seconds: float = 300.0, denied: bool = False) -> None:
        self.sessions = 0
        self.refused = 0
        self.prefixes: list[str] = []
        self._life_seconds = life_seconds
        self._denied = denied
        self._valid: set[str] = set()
        server.faults += [Fault(self._answer, times=None, method=kind) for kind in ("LIST", "HEAD", "GET")]

    def end_sessions(self) -> None:
        self._valid.clear()

    def _answer(self, request: Request, response: Response) -> Response | None:
        if "session" in request.query:
            return self._create(request)
        given = request.headers.get("x-amz-s3session-token") or request.query.get("X-Amz-S3session-Token", [""])[0]
        signed = request.headers.get("authorization", "") + request.query.get("X-Amz-Credential", [""])[0]
        scope = f"KEY-OF-{given}/" in signed and "/s3express/aws4_request" in signed
        if given not in self._valid or not scope or "X-Amz-Security-Token" in request.query:
            self.refused += 1
            return error_response(400 if given else 403, "ExpiredToken" if given else "AccessDenied", "because")
        if not request.key:
            prefix = request.query.get("prefix", [""])[0]
            self.prefixes.append(prefix)
            if prefix and not prefix.endswith("/"):
                return error_response(400, "InvalidRequest", "the prefix must end in the delimiter")
        return None

    def _create(self, request: Request) -> Response:
        if self._denied or "/s3express/aws4_request" not in request.headers.get("authorization", ""):
            return error_response(403, "AccessDenied", "no session")
        self.sessions += 1
        token = f"SESSION{self.sessions}"
        self._valid.add(token)
        until = (datetime.now(UTC) + timedelta(seconds=self._life_seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
        answer = error_response(200, "")
        answer.body = (
            '<CreateSessionResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Credentials>'
            f"<SessionToken>{token}</SessionToken><SecretAccessKey>SESSIONSECRET</SecretAccessKey>"
            f"<AccessKeyId>KEY-OF-{token}</AccessKeyId><Expiration>{until}</Expiration>"
            "</Credentials></CreateSessionResult>"
        ).encode()
        answer.start, answer.count = 0, len(answer.body)
        answer.headers["Content-Length"] = str(answer.count)
        return answer
