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
class Outcome:
    """What a batch did."""

    changes: list[Change]
    unchanged: int
    bundle_changed: bool
    """Whether the ca.pem beside the certificates was written."""


def run(
    ca: CertificateAuthority,
    wants: Sequence[Want],
    out: Path,
    directory_of: Callable[[Want], Path],
    days: float,
    renewal: Renewal,
    gid: int | None = None,
    sign: bool = False,
) -> Outcome:
    """Issue what `wants` lack in their directories; with `sign` for the keys of requests.

    A batch that was interrupted is simply run again: what is good stays.
    """
    why = holding.reason_to_sign if sign else holding.reason_to_issue
    missing = [(want, found) for want in wants if (found := why(directory_of(want), want, renewal))]
    changes, bundle_changed = [], False
    # Once at least, for the bundle; and nothing is written before all of a part is issued.
    for start in range(0, max(len(missing), 1), _AT_ONCE):
        part = missing[start : start + _AT_ONCE]
        made = ca.issue_all([want for want, _ in part], days)
        files.make_directory(out, private=False)
        bundle_changed |= files.write_if_other(out / files.BUNDLE, ca.bundle_pem, files.PUBLIC)
        for issued, (want, reason) in zip(made, part, strict=True):
            directory = directory_of(want)
            _write(directory, issued, gid)
            changes.append(Change(issued, reason, directory / f"{want.identity.role}.pem"))
    return Outcome(changes, len(wants) - len(missing), bundle_changed)


def _write(directory: Path, issued: Issued, gid: int | None) -> None:
    role = issued.identity.role
    if issued.key_pem:
        files.write_pair(directory, role, issued.cert_pem, issued.key_pem, gid)
        return
    files.make_directory(directory, private=False)
    files.write(directory / f"{role}.pem", issued.cert_pem, files.PUBLIC)
