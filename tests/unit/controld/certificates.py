"""A certificate authority of the tests' own."""

from __future__ import annotations

import datetime
import ipaddress

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_DAY = datetime.timedelta(days=1)


class Authority:
    """Issues certificates to servers on this machine and to their clients."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test CA")])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        made = self._builder(self._name, self._key).add_extension(basic, critical=True)
        self._pem = made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def client(self, *dns_names: str, cn: str = "client") -> grpc.ChannelCredentials:
        """Return what a client whose certificate has `dns_names` connects with."""
        cert, key = self._issue(cn, [x509.DNSName(name) for name in dns_names])
        return grpc.ssl_channel_credentials(self._pem, key, cert)

    def server(self) -> grpc.ServerCredentials:
        """Return what a server on 127.0.0.1 listens with; it asks for certificates."""
        host = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        cert, key = self._issue("controld", [host, x509.DNSName("c1.controld.corefleet")])
        return grpc.ssl_server_credentials([(key, cert)], self._pem, require_client_auth=True)

    def _issue(self, cn: str, names: list[x509.GeneralName]) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, cn)])
        made = self._builder(subject, key)
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        cert = made.sign(self._key, hashes.SHA256())
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return cert.public_bytes(Encoding.PEM), pem

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
        )
