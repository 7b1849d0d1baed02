"""A private authority and a certificate for 127.0.0.1, made with the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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


def expire(certificates: Certificates, days: int) -> None:
    """Replace the server's certificate by one that ended `days` ago; the openssl command signs none of the past."""
    from cryptography import x509  # which moto brings
    from cryptography.hazmat.primitives import hashes, serialization

    folder = certificates.server.parent
    authority = x509.load_pem_x509_certificate(certificates.authority.read_bytes())
    signing = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    old = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    ended = datetime.now(UTC) - timedelta(days=days)
    builder = x509.CertificateBuilder(authority.subject, old.subject, old.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(ended - timedelta(days=30)).not_valid_after(ended)
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    builder = builder.add_extension(names.value, critical=False)
    new = builder.sign(signing, hashes.SHA256())  # type: ignore[arg-type]
    key = (folder / "server.key").read_bytes()
    certificates.server.write_bytes(new.public_bytes(serialization.Encoding.PEM) + key)
