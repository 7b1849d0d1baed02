"""A private authority and a certificate for 127.0.0.1, made with the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    authority: Path
    """PEM of the authority, for clients."""
    server: Path
    """PEM of certificate and key, for the server."""


def make_certificates(folder: Path, *, name: str = "IP:127.0.0.1") -> Certificates:
    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority", "-days", "30")
    run("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server")
    (folder / "extensions").write_text(f"subjectAltName={name}\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30", "-extfile", "extensions")
    run("x509", "-req", "-in", "server.csr", "-out", "server.crt", *signing)
    both = folder / "server.pem"
    both.write_text((folder / "server.crt").read_text() + (folder / "server.key").read_text())
    return Certificates(folder / "ca.pem", both)
