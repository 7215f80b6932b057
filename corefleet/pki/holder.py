"""Whose certificate it is, for programs that must know who they are to others."""

from __future__ import annotations

from cryptography import x509

from corefleet.identity import Identity
from corefleet.pki.certificates import facts


def holder(pem: bytes) -> Identity | None:
    """Return the identity in the first certificate of `pem`, None when it names none.

    Raises ValueError when there is no certificate.
    """
    return facts(x509.load_pem_x509_certificates(pem)[0]).identity
