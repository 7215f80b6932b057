"""Whose certificate it is, for programs that must know who they are to others."""

from __future__ import annotations

from cryptography import x509

from corefleet.identity import Identity, find_identity


def holder(pem: bytes) -> Identity | None:
    """Return the identity in the first certificate of `pem`, None when it names none.

    Raises ValueError when there is no certificate.
    """
    extensions = x509.load_pem_x509_certificates(pem)[0].extensions
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    return find_identity(names.get_values_for_type(x509.DNSName))
