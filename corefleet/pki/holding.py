"""A holder's files: its pair in a directory, whether it is good, and the next key.

<role>.pem <role>.key      what the program uses
<role>.next.key <role>.csr the next key and the request for it, until `install`
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from corefleet.errors import Conflict, InvalidInput
from corefleet.identity import Identity, Role
from corefleet.pki import files
from corefleet.pki.certificates import check_csr, key_pem, make_csr, new_key
from corefleet.pki.reading import Facts, fits, is_signed_by, load_key, read_certs
from corefleet.pki.wants import Want


@dataclass(frozen=True, slots=True)
class Renewal:
    """When a certificate that is still valid is made anew."""

    now_s: float
    before_s: float | None
    """So long before its end; None: always."""
    signer: str
    """Id of the CA that signs now; '' when that is not known."""


def reason(held: Facts | None, key_fits: bool, want: Want, renewal: Renewal) -> str:
    """Return why `want` needs a new certificate although `held` is there; '' when it is good."""
    if held is None:
        return "there was none"
    if not key_fits:
        return "the key does not fit"
    if held.identity != want.identity or set(held.hosts) != set(want.hosts):
        return "other names"
    if renewal.signer and held.issuer_ca != renewal.signer:
        return "signed by another CA"
    if renewal.before_s is None:
        return "asked for"
    if held.not_after_s - renewal.now_s <= renewal.before_s:
        return "expires soon"
    return ""


def read_facts(directory: Path, role: Role) -> Facts | None:
    """Return what the certificate in `directory` says; None without a readable one."""
    path = directory / f"{role}.pem"
    try:
        return read_certs(path.read_bytes(), path)[0]
    except (FileNotFoundError, NotADirectoryError, InvalidInput):
        # A damaged file is as good as none: it is made anew.
        return None


def has_fitting_key(directory: Path, role: Role, held: Facts | None) -> bool:
    """Whether the key in `directory` is that of `held`."""
    path = directory / f"{role}.key"
    try:
        return held is not None and fits(held.cert, load_key(path.read_bytes(), path))
    except (FileNotFoundError, NotADirectoryError, InvalidInput):
        return False


def reason_to_issue(directory: Path, want: Want, renewal: Renewal) -> str:
    """Return why the pair in `directory` has to be made anew; '' when it is good."""
    role = want.identity.role
    held = read_facts(directory, role)
    return reason(held, has_fitting_key(directory, role, held), want, renewal)


def reason_to_sign(directory: Path, want: Want, renewal: Renewal) -> str:
    """Return why the certificate in `directory` has to be made anew for the key of a request.

    Raises InvalidInput when the request asks for anything but `want`.
    """
    held = read_facts(directory, want.identity.role)
    same_key = held is not None
    if want.csr_pem is not None:
        key = check_csr(want.csr_pem, want.identity, want.hosts)
        same_key = held is not None and held.cert.public_key() == key
    return reason(held, same_key, want, renewal)


def signer_of(directory: Path) -> str:
    """Return the id of the CA that signs now: a host's bundle has it first. '' without a bundle."""
    path = directory / files.BUNDLE
    try:
        first = read_certs(path.read_bytes(), path)[0]
    except (FileNotFoundError, NotADirectoryError):
        return ""
    # A CA signs itself: its issuer is its own.
    return first.issuer_ca


def request(directory: Path, want: Want) -> tuple[Path, bool]:
    """Return where a request for `want` lies, and whether it had to be made.

    The key stays in `directory`, readable by its owner only, and waits there for `install`.
    """
    role = want.identity.role
    key_path, csr_path = directory / f"{role}.next.key", directory / f"{role}.csr"
    if _is_pending(key_path, csr_path, want):
        return csr_path, False
    files.make_directory(directory, private=False)
    key = new_key()
    files.write(key_path, key_pem(key), files.SECRET)
    files.write(csr_path, make_csr(key, want.identity, want.hosts), files.PUBLIC)
    return csr_path, True


def install(
    directory: Path,
    role: Role,
    cert_pem: bytes,
    gid: int | None,
    key: ec.EllipticCurvePrivateKey | None = None,
) -> bool:
    """Put a certificate in place with `key`, or with the one that waits for it.

    Returns False when it was there. Raises InvalidInput for another role's certificate or one
    that no CA of the host's bundle signed, Conflict when the key is not its own.
    """
    held = read_certs(cert_pem, directory / f"{role}.pem")[0]
    if held.identity is None or held.identity.role != role:
        raise InvalidInput("cert", held.subject, f"a certificate of the role {role}")
    bundle = directory / files.BUNDLE
    authorities = read_certs(files.read("ca", bundle), bundle)
    if not any(is_signed_by(held.cert, ca.cert) for ca in authorities):
        raise InvalidInput("cert", held.issuer, f"a certificate that a CA of {bundle} signed")
    current = read_facts(directory, role)
    if current and current.serial == held.serial and has_fitting_key(directory, role, current):
        _drop_request(directory, role, held)
        return False
    key = key or _waiting_key(directory, role)
    if key is None or not fits(held.cert, key):
        raise Conflict(
            f"{directory}: the key is not that of the certificate {held.serial} of"
            f" {held.identity}, which belongs to another key or request"
        )
    files.write_pair(directory, role, cert_pem, key_pem(key), gid)
    _drop_request(directory, role, held)
    return True


def _waiting_key(directory: Path, role: Role) -> ec.EllipticCurvePrivateKey | None:
    path = directory / f"{role}.next.key"
    return load_key(files.read("key", path), path) if path.exists() else None


def _is_pending(key_path: Path, csr_path: Path, want: Want) -> bool:
    try:
        key = load_key(key_path.read_bytes(), key_path)
        return check_csr(csr_path.read_bytes(), want.identity, want.hosts) == key.public_key()
    except (FileNotFoundError, NotADirectoryError, InvalidInput):
        return False


def _drop_request(directory: Path, role: Role, held: Facts) -> None:
    """Remove the request that `held` answers; a newer one stays."""
    waiting = _waiting_key(directory, role)
    if waiting is None or not fits(held.cert, waiting):
        return
    for name in (f"{role}.csr", f"{role}.next.key"):
        path = directory / name
        if path.exists():
            os.unlink(path)


def place(out: Path, identity: Identity) -> Path:
    """Return the directory of one holder among many: `<out>/<role>/<name>`."""
    return out / identity.role / identity.name
