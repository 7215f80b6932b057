"""corefleet's certificate authority: certificates of all programs, and the CA's own rotation."""

from corefleet.pki.authority import CertificateAuthority
from corefleet.pki.certificates import Issued
from corefleet.pki.wants import Want

__all__ = ["CertificateAuthority", "Issued", "Want"]
