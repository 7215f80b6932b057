"""A CA of the tests' own, which can also make what no proper one would."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from corefleet.config import TlsConfig
from corefleet.identity import Identity

HOSTS = ("127.0.0.1", "localhost")
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, as PEM."""

    cert_pem: bytes
    key_pem: bytes


class Authority:
    """Signs certificates that are valid from `since_days` (from now) for `days`."""

    def __init__(self, name: str = "test CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self._name, self._name, self._key, -1, 10).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.bundle_pem = _pem(builder.sign(self._key, hashes.SHA256()))

    def issue(
        self,
        identity: Identity,
        hosts: Sequence[str] = HOSTS,
        *,
        since_days: float = -1,
        days: float = 30,
    ) -> Issued:
        """Return a certificate as docs/security.md describes it."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.role)])
        names = [x509.DNSName(identity.dns_name), *map(_general_name, hosts)]
        builder = _builder(subject, self._name, key, since_days, days).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        held = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Issued(_pem(builder.sign(self._key, hashes.SHA256())), held)

    def write(
        self,
        directory: Path,
        identity: Identity,
        *,
        hosts: Sequence[str] = HOSTS,
        trusted: Sequence[Authority] = (),
    ) -> TlsConfig:
        """Write a new certificate for `identity` with what it believes: this CA by default."""
        directory.mkdir(parents=True, exist_ok=True)
        files = TlsConfig(
            ca=str(directory / "ca.pem"),
            cert=str(directory / f"{identity.role}.pem"),
            key=str(directory / f"{identity.role}.key"),
        )
        issued = self.issue(identity, hosts)
        Path(files.ca).write_bytes(b"".join(each.bundle_pem for each in trusted or (self,)))
        Path(files.cert).write_bytes(issued.cert_pem)
        Path(files.key).write_bytes(issued.key_pem)
        return files


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    since_days: float,
    days: float,
) -> x509.CertificateBuilder:
    since = datetime.datetime.now(datetime.UTC) + since_days * _DAY
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(since + days * _DAY)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
