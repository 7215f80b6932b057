"""What certificates lie in files and directories, and what is wrong with them."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from corefleet.errors import InvalidInput
from corefleet.pki import files
from corefleet.pki.authority import CERTIFICATE_DAYS
from corefleet.pki.certificates import CLOCKS_DIFFER_S, DAY_S
from corefleet.pki.reading import Facts, fits, is_signed_by, load_key, read_certs

_CA_WARN_S = 2 * CERTIFICATE_DAYS * DAY_S
"""A CA signs nothing that outlives it: so long before its end is the time to replace it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One certificate of a file. `problems` is empty when all is well."""

    file: Path
    facts: Facts
    left_s: float
    problems: tuple[str, ...]


def inspect(paths: Sequence[Path], now_s: float, warn_s: float) -> list[Seen]:
    """Return every certificate in `paths`; of a directory all *.pem below it, hidden ones not.

    A certificate has problems when it is over, or will be within `warn_s` (a CA's: within twice
    the life of what it signs), when the key beside it
    is not its own or can be read by everyone, or when no CA of the ca.pem beside it signed it.
    Raises InvalidInput for a file that holds no certificate.
    """
    found: list[Seen] = []
    bundles: dict[Path, list[x509.Certificate]] = {}
    for file in _files(paths):
        authorities = _bundle_beside(file, bundles)
        for read in read_certs(files.read("certificate", file), file):
            cert = read.cert
            problems = [*_time_problems(read, now_s, _CA_WARN_S if read.is_ca else warn_s)]
            problems += _key_problems(file.with_suffix(".key"), cert)
            if authorities and not any(is_signed_by(cert, ca) for ca in authorities):
                problems.append(f"no CA of {files.BUNDLE} signed it")
            found.append(Seen(file, read, read.not_after_s - now_s, tuple(problems)))
    return found


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        below = [file for file in sorted(path.rglob("*.pem")) if _is_shown(file, path)]
        if not below:
            raise InvalidInput("path", str(path), "a directory with certificates, *.pem")
        yield from below


def _is_shown(file: Path, top: Path) -> bool:
    return not any(part.startswith(".") for part in file.relative_to(top).parts)


def _bundle_beside(file: Path, known: dict[Path, list[x509.Certificate]]) -> list[x509.Certificate]:
    if file.parent not in known:
        bundle = file.parent / files.BUNDLE
        found = read_certs(files.read("ca", bundle), bundle) if bundle.exists() else []
        known[file.parent] = [each.cert for each in found]
    return known[file.parent]


def _time_problems(read: Facts, now_s: float, warn_s: float) -> Iterator[str]:
    if read.not_after_s <= now_s:
        yield "expired"
    elif read.not_after_s - now_s <= warn_s:
        yield "expires soon"
    if read.not_before_s > now_s + CLOCKS_DIFFER_S:
        yield "not valid yet"


def _key_problems(path: Path, cert: x509.Certificate) -> list[str]:
    try:
        mode, pem = path.stat().st_mode, path.read_bytes()
    except FileNotFoundError:
        return []
    except PermissionError:
        # Who may not read the key cannot say more of it.
        return []
    problems = []
    if mode & stat.S_IRWXO:
        problems.append(f"{path.name} is readable by others")
    try:
        if not fits(cert, load_key(pem, path)):
            problems.append(f"{path.name} does not fit")
    except InvalidInput:
        problems.append(f"{path.name} is no key")
    return problems
