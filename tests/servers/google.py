"""Where Google's tokens come from, on a loopback port: OAuth, STS, impersonation and the metadata server."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["GoogleServer"]


class GoogleServer:
    """Gives out tokens, each accepted by whoever looks at `tokens`, until `close`.

    Attributes:
        asked: paths, by how often.
        expires_in: seconds that tokens are said to live. google-auth renews those that live less than 225.
        refusal: what is answered instead of a token: a status and a document.
        failures: how many requests are refused so; None for all.
    """

    def __init__(self) -> None:
        self.tokens: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.bodies: list[str] = []
        self.expires_in = 3600
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.failures: int | None = None
        self._issued = 0
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner._answer(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def __enter__(self) -> GoogleServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0)).decode()
        with self._lock:
            self.asked[path] += 1
            self.bodies.append(body)
            status, document = self._document(path)
        answer = (document if isinstance(document, str) else json.dumps(document)).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(answer)))
        handler.send_header("Metadata-Flavor", "Google")
        handler.send_header("Content-Type", "application/text" if isinstance(document, str) else "application/json")
        handler.end_headers()
        handler.wfile.write(answer)

    def _document(self, path: str) -> tuple[int, dict[str, Any] | str]:
        if path.startswith("/computeMetadata/v1/project"):
            return 200, "project-of-the-machine"
        if path == "/":
            return 200, "computeMetadata/"
        if re.search("/service-accounts/[^/]+/$", path):
            return 200, {"email": "me@project.iam.gserviceaccount.com", "scopes": [], "aliases": ["default"]}
        if self.refusal is not None and self.failures != 0:
            if self.failures is not None:
                self.failures -= 1
            return self.refusal
        self._issued += 1
        token = f"ya29.token-{self._issued}"
        if path == "/sts":  # only good for the next step, if there is one
            token = f"federated-{self._issued}"
        self.tokens.add(token)
        if path.endswith(":generateAccessToken"):
            expiry = datetime.now(UTC) + timedelta(seconds=self.expires_in)
            return 200, {"accessToken": token, "expireTime": expiry.strftime("%Y-%m-%dT%H:%M:%SZ")}
        return 200, {"access_token": token, "expires_in": self.expires_in, "token_type": "Bearer"}
