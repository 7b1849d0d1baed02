"""Every command ends on a signal, with the code that shells give it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.artifacts.fetching import ROOT, WEIGHTS
from tests.servers.object_server import ObjectServer


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_in_the_midst_of_reading(number: signal.Signals, code: int) -> None:
    with ObjectServer(bytes_per_second=200_000) as server:
        for key, body in WEIGHTS.items():
            server.put("models", f"m/{key}", body)
        server.put("models", "m/s3stream-manifest.json", b"x" * 200_000)  # a second's reading
        process = subprocess.Popen(
            [sys.executable, "-c", "from streamer.cli import main; main()", "verify", "s3://models/m"],
            cwd=ROOT,
            env={**os.environ, "S3STREAM_ENDPOINT_URL": server.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        limit = time.monotonic() + 30
        while server.counters.body_bytes < 50_000:
            assert time.monotonic() < limit
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert out == ""
    assert err.splitlines()[-1] == f"s3stream: ended by {number.name}"
    assert "Traceback" not in err
