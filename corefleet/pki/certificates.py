"""X.509: what corefleet's certificates say, and how they are asked for and signed."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from corefleet.errors import InvalidInput
from corefleet.identity import Identity
from corefleet.pki.reading import UNREADABLE, ca_id, serial_text, short_id
from corefleet.pki.wants import SERVERS, is_address

DAY_S = 86_400
CLOCKS_DIFFER_S = 300
"""Certificates are valid from so long before they are made: not every clock is right."""

_ORGANIZATION = "corefleet"


@dataclass(frozen=True, slots=True)
class Issued:
    """A new certificate. `key_pem` is empty when the holder made the key itself."""

    identity: Identity
    hosts: tuple[str, ...]
    serial: str
    """Hexadecimal, as openssl and `pki show` print it."""
    not_before_s: int
    not_after_s: int
    """Seconds since 1970, UTC."""
    ca: str
    """Id of the CA that signed it."""
    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class SigningCa:
    """A CA's certificate with its key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def id(self) -> str:
        """What state, index and files call it."""
        return ca_id(self.cert)


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a fresh key on the curve P-256, which TLS libraries everywhere know."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM (PKCS #8), without a passphrase."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def cert_pem(cert: x509.Certificate) -> bytes:
    """Return a certificate as PEM."""
    return cert.public_bytes(serialization.Encoding.PEM)


def make_ca(now_s: float, days: float) -> SigningCa:
    """Return a new self-signed CA, which signs certificates of holders only (path length 0).

    Its subject holds its id: two CAs of one bundle are never mistaken for each other.
    """
    key = new_key()
    known_as = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = _name(f"corefleet CA {short_id(known_as.digest)}")
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    cert = (
        _builder(name, name, key.public_key(), now_s, now_s + days * DAY_S)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(known_as, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known_as),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    return SigningCa(cert, key)


class Signer:
    """Signs certificates by one CA; what is the same for all of them is made once."""

    def __init__(self, ca: SigningCa) -> None:
        self._ca = ca
        self.ends_s = ca.cert.not_valid_after_utc.timestamp()
        """When the CA itself ends, in seconds since 1970."""
        self._id = ca.id
        found = ca.cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        self._authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
            found.value
        )

    def sign(
        self,
        identity: Identity,
        hosts: Sequence[str],
        csr_pem: bytes | None,
        now_s: float,
        end_s: float,
    ) -> Issued:
        """Return a certificate until `end_s`, for the key of a checked CSR or for a new one."""
        if csr_pem is None:
            key = new_key()
            public, private = key.public_key(), key_pem(key)
        else:
            public, private = check_csr(csr_pem, identity, hosts), b""
        usage = x509.KeyUsage(
            digital_signature=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, key_cert_sign=False, crl_sign=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if identity.role in SERVERS:
            purposes.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        cert = (
            _builder(_name(identity.role), self._ca.cert.subject, public, now_s, end_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(alternative_names(identity, hosts), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(self._authority, critical=False)
            .sign(self._ca.key, hashes.SHA256())
        )
        return Issued(
            identity=identity,
            hosts=tuple(hosts),
            serial=serial_text(cert),
            not_before_s=int(cert.not_valid_before_utc.timestamp()),
            not_after_s=int(cert.not_valid_after_utc.timestamp()),
            ca=self._id,
            cert_pem=cert_pem(cert),
            key_pem=private,
        )


def alternative_names(identity: Identity, hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    """Return the names of a certificate: the identity, then the hosts."""
    names: list[x509.GeneralName] = [x509.DNSName(identity.dns_name)]
    names += [
        x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host)
        for host in hosts
    ]
    return x509.SubjectAlternativeName(names)


def make_csr(key: ec.EllipticCurvePrivateKey, identity: Identity, hosts: Sequence[str]) -> bytes:
    """Return a request, as PEM, for a certificate that says what ours say."""
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_name(identity.role))
        .add_extension(alternative_names(identity, hosts), critical=False)
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.PEM)


def check_csr(pem: bytes, identity: Identity, hosts: Sequence[str]) -> ec.EllipticCurvePublicKey:
    """Return the public key of a request that asks for exactly this identity and these hosts.

    Raises InvalidInput when it asks for anything else, is not signed by its own key, or has
    a key of another kind.
    """
    try:
        request = x509.load_pem_x509_csr(pem)
        asked = set(request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
        same = request.subject == _name(identity.role) and len(request.extensions) == 1
        subject = request.subject.rfc4514_string()
        key, signed = request.public_key(), request.is_signature_valid
    except UNREADABLE as error:
        raise InvalidInput("csr", str(identity), f"a request in PEM with names ({error})") from None
    wanted = set(alternative_names(identity, hosts))
    if asked != wanted or not same:
        shown = ", ".join(sorted(str(name.value) for name in asked))
        expected = ", ".join(sorted(str(name.value) for name in wanted))
        raise InvalidInput("csr", f"{subject}: {shown}", f"for {identity}: only {expected}")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidInput("csr", f"key of {identity}", "an EC key on the curve P-256")
    if not signed:
        raise InvalidInput("csr", str(identity), "a request signed by its own key")
    return key


def _name(common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, _ORGANIZATION),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now_s: float,
    end_s: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now_s - CLOCKS_DIFFER_S))
        .not_valid_after(_time(end_s))
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(int(seconds), UTC)
