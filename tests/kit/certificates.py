"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and of its key, and `both` in one."""

    cert: str
    key: str
    both: str


class Authority:
    """Signs certificates into `folder`; `file` holds its own."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        cert = self._builder(self._name, self._key, 1).add_extension(constraints, critical=True)
        self.file = str(folder / f"{name}.pem")
        Path(self.file).write_bytes(cert.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def sign(
        self, name: str, *, days: int = 1, organization: str | None = None, address: str = "127.0.0.1"
    ) -> Pair:
        """A certificate for `name`, and for `address`, that ends in `days` days."""
        key = ec.generate_private_key(ec.SECP256R1())
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        builder = self._builder(_name(name, organization), key, days).add_extension(here, critical=False)
        cert = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        files = [self._folder / f"{name}-{part}.pem" for part in ("cert", "key", "both")]
        for file, data in zip(files, (cert, private, cert + private), strict=True):
            file.write_bytes(data)
        return Pair(*map(str, files))

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(10))
            .not_valid_after(now + datetime.timedelta(days))
        )  # fmt: skip


def _name(name: str, organization: str | None = None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else []
    return x509.Name(parts + ([x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization)] if organization else []))
