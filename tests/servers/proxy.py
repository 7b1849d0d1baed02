"""A forward proxy: absolute-form GET for http, CONNECT for https, Basic authorization if asked for."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Callable
from urllib.parse import urlsplit


class Proxy:
    """Relays until `close`; `seen` has the first line of every request.

    Args:
        credentials: user and password that are asked for.
        change: makes other header lines of those of requests that are not tunnelled.
    """

    def __init__(self, credentials: str | None = None, change: Callable[[str], str] = str) -> None:
        self.seen: list[str] = []
        self._change = change
        self._expected = f"Basic {base64.b64encode(credentials.encode()).decode()}" if credentials else None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            head = b""
            while b"\r\n\r\n" not in head:
                more = client.recv(65536)
                if not more:
                    return
                head += more
            head, _, body = head.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            self.seen.append(first)
            headers = dict(line.split(": ", 1) for line in lines)
            if self._expected and headers.get("Proxy-Authorization") != self._expected:
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            method, target, version = first.split(" ")
            if method == "CONNECT":
                host, _, port = target.rpartition(":")
                with socket.create_connection((host, int(port))) as upstream:
                    client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    _pump(client, upstream)
                return
            parts = urlsplit(target)
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            kept = [self._change(line) for line in lines if not line.lower().startswith(("proxy-", "connection:"))]
            with socket.create_connection((parts.hostname or "", parts.port or 80)) as upstream:
                request = "\r\n".join((f"{method} {path} {version}", *kept, "Connection: close", "", ""))
                length = int({name.lower(): value for name, value in headers.items()}.get("content-length", 0))
                while len(body) < length:
                    body += client.recv(65536)
                upstream.sendall(request.encode("latin-1") + body)
                while data := upstream.recv(65536):
                    client.sendall(data)


def _pump(left: socket.socket, right: socket.socket) -> None:
    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    back = threading.Thread(target=copy, args=(right, left), daemon=True)
    back.start()
    copy(left, right)
    back.join()
