"""What keys and certificates in files say, ours or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from corefleet.errors import InvalidInput
from corefleet.identity import Identity, find_identity

UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What the library raises for input that is damaged, forged or strange: found by changing bytes."""

_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Facts:
    """What a certificate says of itself."""

    cert: x509.Certificate = field(repr=False)
    subject: str
    issuer: str
    identity: Identity | None
    hosts: tuple[str, ...]
    serial: str
    not_before_s: float
    not_after_s: float
    issuer_ca: str
    """Id of the CA that it names as its issuer; '' when it names none."""
    is_ca: bool


def load_key(pem: bytes, path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key in `pem`; raises InvalidInput naming `path`, never the content."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except UNREADABLE:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidInput("key", str(path), "a PEM file of an EC key without a passphrase")
    return key


def short_id(key_identifier: bytes) -> str:
    """Return the start of a CA's key identifier, in hexadecimal: what the CA is called."""
    return key_identifier[:_ID_BYTES].hex()


def ca_id(cert: x509.Certificate) -> str:
    """Return what a CA is called."""
    found = cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    return short_id(found.value.digest)


def read_certs(pem: bytes, path: Path) -> list[Facts]:
    """Return what the certificates in `pem` say; raises InvalidInput when there is none."""
    try:
        return [_facts(cert) for cert in x509.load_pem_x509_certificates(pem)]
    except UNREADABLE:
        raise InvalidInput("certificate", str(path), "a PEM file of certificates") from None


def _facts(cert: x509.Certificate) -> Facts:
    dns, addresses = _names(cert)
    identity = find_identity(dns)
    own = identity.dns_name if identity else None
    return Facts(
        cert=cert,
        subject=cert.subject.rfc4514_string(),
        issuer=cert.issuer.rfc4514_string(),
        identity=identity,
        hosts=(*(name for name in dns if name != own), *addresses),
        serial=serial_text(cert),
        not_before_s=cert.not_valid_before_utc.timestamp(),
        not_after_s=cert.not_valid_after_utc.timestamp(),
        issuer_ca=_issuer_ca(cert),
        is_ca=_is_ca(cert),
    )


def is_signed_by(cert: x509.Certificate, ca: x509.Certificate) -> bool:
    """Whether `ca` signed `cert`; says nothing of their times."""
    try:
        cert.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def fits(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> bool:
    """Whether `key` is the private key of `cert`."""
    return cert.public_key() == key.public_key()


def serial_text(cert: x509.Certificate) -> str:
    """Return a certificate's serial number in hexadecimal."""
    return f"{cert.serial_number:x}"


def _names(cert: x509.Certificate) -> tuple[list[str], list[str]]:
    try:
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [], []
    addresses = found.get_values_for_type(x509.IPAddress)
    return found.get_values_for_type(x509.DNSName), [str(address) for address in addresses]


def _issuer_ca(cert: x509.Certificate) -> str:
    try:
        found = cert.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    except x509.ExtensionNotFound:
        return ""
    return short_id(found.key_identifier or b"")


def _is_ca(cert: x509.Certificate) -> bool:
    try:
        return cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False
