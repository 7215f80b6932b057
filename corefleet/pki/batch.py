"""Certificates for many holders at once, into files: only what has to be made is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from corefleet.pki import files, holding
from corefleet.pki.authority import CertificateAuthority
from corefleet.pki.certificates import Issued
from corefleet.pki.holding import Renewal
from corefleet.pki.wants import Want

_AT_ONCE = 512
"""So many are signed and put into the index together, and then written: a bound of what a crash
leaves in the index without files."""


@dataclass(frozen=True, slots=True)
class Change:
    """A certificate that was made, why, and where it is."""

    issued: Issued
    reason: str
    cert: Path


@dataclass(frozen=True, slots=True)
class Lack:
    """A want that needs a certificate, why, and the directory where it goes."""

    want: Want
    reason: str
    directory: Path


def lacks(
    wants: Sequence[Want],
    directory_of: Callable[[Want], Path],
    renewal: Renewal,
    sign: bool = False,
) -> list[Lack]:
    """Return which of `wants` need a certificate; with `sign` for the keys of their requests."""
    why = holding.reason_to_sign if sign else holding.reason_to_issue
    found = []
    for want in wants:
        directory = directory_of(want)
        reason = why(directory, want, renewal)
        if reason:
            found.append(Lack(want, reason, directory))
    return found


def bundle_differs(ca: CertificateAuthority, out: Path) -> bool:
    """Whether the ca.pem in `out` is not what the CA says."""
    path = out / files.BUNDLE
    return not path.exists() or path.read_bytes() != ca.bundle_pem


def issue(
    ca: CertificateAuthority,
    missing: Sequence[Lack],
    out: Path,
    days: float,
    gid: int | None = None,
) -> tuple[list[Change], bool]:
    """Issue what is missing; returns that, and whether the ca.pem in `out` was written.

    A batch that was interrupted is simply run again: what is good stays.
    """
    changes, bundle_changed = [], False
    # Once at least, for the bundle; and nothing is written before all of a part is issued.
    for start in range(0, max(len(missing), 1), _AT_ONCE):
        part = missing[start : start + _AT_ONCE]
        made = ca.issue_all([lack.want for lack in part], days)
        files.make_directory(out, private=False)
        bundle_changed |= files.write_if_other(out / files.BUNDLE, ca.bundle_pem, files.PUBLIC)
        for issued, lack in zip(made, part, strict=True):
            _write(lack.directory, issued, gid)
            cert = lack.directory / f"{issued.identity.role}.pem"
            changes.append(Change(issued, lack.reason, cert))
    return changes, bundle_changed


def _write(directory: Path, issued: Issued, gid: int | None) -> None:
    role = issued.identity.role
    if issued.key_pem:
        files.write_pair(directory, role, issued.cert_pem, issued.key_pem, gid)
        return
    files.make_directory(directory, private=False)
    files.write(directory / f"{role}.pem", issued.cert_pem, files.PUBLIC)
