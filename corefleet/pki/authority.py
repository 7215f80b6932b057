"""The certificate authority: a directory of plain files, and what is done with it.

state.json          which CA signs, and which other one is trusted during a rotation
ca.pem              the bundle that every host gets: all trusted CAs, the one that signs first
cas/<id>.pem .key   the CAs' certificates and keys
issued.jsonl        the index of what was issued, append-only
lock                held by whoever changes something
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from corefleet.errors import Conflict, CorruptRecord, Incompatible, InvalidInput, NotFound
from corefleet.identity import Identity
from corefleet.ids import check_name
from corefleet.pki import files, index, rotation
from corefleet.pki.certificates import (
    DAY_S,
    Issued,
    Signer,
    SigningCa,
    cert_pem,
    key_pem,
    make_ca,
)
from corefleet.pki.reading import load_key, read_certs
from corefleet.pki.rotation import AuthorityState
from corefleet.pki.wants import Want, check_hosts

CA_DAYS = 3650.0
CERTIFICATE_DAYS = 90.0


_STATE = "state.json"
_CAS = "cas"
_INDEX = "issued.jsonl"
_LOCK = "lock"

Clock = Callable[[], float]


class CertificateAuthority:
    """Issues certificates. Any number of processes may use one directory: changes take turns."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        """Use `create` or `load`."""
        self._directory = directory
        self._clock = clock
        self._state = _read_state(directory)
        self._signer: tuple[str, Signer] | None = None

    @classmethod
    def create(
        cls, directory: Path, days: float = CA_DAYS, clock: Clock = time.time
    ) -> CertificateAuthority:
        """Make a CA in `directory`; a new directory is its owner's only.

        Raises Conflict when one is there, InvalidInput for impossible days.
        """
        _check_days("CA days", days, None)
        if (directory / _STATE).exists():
            raise Conflict(f"{directory}: a certificate authority is there; it is not overwritten")
        files.make_directory(directory, private=True)
        if directory.stat().st_mode & 0o022:
            raise InvalidInput("directory", str(directory), "one that only its owner can write to")
        with files.locked(directory / _LOCK):
            if (directory / _STATE).exists():
                raise Conflict(f"{directory}: a certificate authority is there already")
            first = _add_ca(directory, clock(), days)
            # The state makes it a CA: a crash before this leaves files that nothing refers to.
            _write_state(directory, AuthorityState(signer=first))
            _settle(directory, AuthorityState(signer=first))
        return cls(directory, clock)

    @classmethod
    def load(cls, directory: Path, clock: Clock = time.time) -> CertificateAuthority:
        """Return the CA in `directory`; raises NotFound, CorruptRecord or Incompatible."""
        return cls(directory, clock)

    @property
    def state(self) -> AuthorityState:
        """Which CA signs, and how far a rotation is; as last read or written."""
        return self._state

    @property
    def bundle_pem(self) -> bytes:
        """Certificates of all trusted CAs, the one that signs first: every host's ca.pem."""
        return _bundle(self._directory, self._state)

    @property
    def issued(self) -> list[index.Entry]:
        """All that was ever issued, oldest first."""
        return index.read(self._directory / _INDEX)

    def issue(
        self, identity: Identity, hosts: Sequence[str] = (), days: float = CERTIFICATE_DAYS
    ) -> Issued:
        """Return a new key with its certificate for `identity`, listening on `hosts`."""
        return self.issue_all([Want(identity, tuple(hosts))], days)[0]

    def sign(
        self,
        csr_pem: bytes,
        identity: Identity,
        hosts: Sequence[str] = (),
        days: float = CERTIFICATE_DAYS,
    ) -> Issued:
        """Return a certificate for the key of a request, which must ask for just these names."""
        return self.issue_all([Want(identity, tuple(hosts), csr_pem)], days)[0]

    def issue_all(self, wants: Sequence[Want], days: float = CERTIFICATE_DAYS) -> list[Issued]:
        """Issue all of `wants` or none; they are in the index, synced, when this returns.

        Raises InvalidInput for a wrong name, host, request or days.
        """
        checked = [
            (want, check_hosts(want.identity.role, want.hosts))
            for want in wants
            if check_name("name", want.identity.name)
        ]
        with files.locked(self._directory / _LOCK):
            signer = self._current_signer()
            now_s = self._clock()
            _check_days("days", days, (signer.ends_s - now_s) / DAY_S)
            end_s = now_s + days * DAY_S
            issued = [
                signer.sign(want.identity, hosts, want.csr_pem, now_s, end_s)
                for want, hosts in checked
            ]
            index.append(self._directory / _INDEX, [index.entry_of(each) for each in issued])
        return issued

    def rotate(self, step: rotation.Pass, days: float = CA_DAYS, force: bool = False) -> bool:
        """Carry out one pass of a rotation; returns whether the state changed.

        Whatever an earlier, interrupted pass left is completed. Raises Conflict when it is
        another pass's turn, or when `finish` would lock out holders whose newest certificate
        is of the old CA and not over, unless `force`.
        """
        _check_days("CA days", days, None)
        with files.locked(self._directory / _LOCK):
            state = self._state = _read_state(self._directory)
            changed = not rotation.is_done(state, step)
            if changed:
                if step == "finish" and not force:
                    self._refuse_to_lock_out(state.other)
                self._state = self._moved(state, step, days)
                _write_state(self._directory, self._state)
            _settle(self._directory, self._state)
        return changed

    def left_behind(self, ca: str) -> list[index.Entry]:
        """Return the newest certificate of each holder for whom it is of `ca` and not over."""
        now_s = self._clock()
        return [
            entry
            for entry in index.newest(self.issued)
            if entry.ca == ca and entry.not_after_s > now_s
        ]

    def _moved(self, state: AuthorityState, step: rotation.Pass, days: float) -> AuthorityState:
        if step == "begin":
            return rotation.begun(state, _add_ca(self._directory, self._clock(), days))
        return rotation.switched(state) if step == "switch" else rotation.finished(state)

    def _refuse_to_lock_out(self, ca: str) -> None:
        left = self.left_behind(ca)
        if left:
            first = ", ".join(f"{entry.role}/{entry.name}" for entry in left[:5])
            raise Conflict(
                f"rotate-ca finish: {len(left)} holders have only certificates of the old CA {ca}:"
                f" {first}{', ...' if len(left) > 5 else ''}; issue theirs anew, or --force when"
                " they are gone"
            )

    def _current_signer(self) -> Signer:
        """Return the signer of the state on disk: another process may have rotated."""
        self._state = _read_state(self._directory)
        if self._signer is None or self._signer[0] != self._state.signer:
            ca = _read_ca(self._directory, self._state.signer)
            self._signer = (self._state.signer, Signer(ca))
        return self._signer[1]


def _check_days(field: str, days: float, most: float | None) -> None:
    if not days > 0 or days > 100 * CA_DAYS:
        raise InvalidInput(field, days, "more than 0, and at most 1000 years")
    if most is not None and days > most:
        raise InvalidInput(field, days, f"at most {max(most, 0):.1f}: the CA ends then; rotate it")


def _read_state(directory: Path) -> AuthorityState:
    path = directory / _STATE
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"{directory}: no certificate authority; `agentctl pki init` makes one"
        ) from None
    try:
        state = msgspec.json.decode(content, type=AuthorityState)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"{path}: {error}; expected the state of a CA") from None
    if state.version != rotation.VERSION:
        raise Incompatible(
            f"{path}: version {state.version}; this corefleet knows {rotation.VERSION}: use the"
            " one that wrote it"
        )
    return state


def _write_state(directory: Path, state: AuthorityState) -> None:
    files.write(directory / _STATE, msgspec.json.encode(state) + b"\n", files.SECRET)


def _add_ca(directory: Path, now_s: float, days: float) -> str:
    """Make a CA's files and return its id; it is nothing until the state names it."""
    ca = make_ca(now_s, days)
    files.make_directory(directory / _CAS, private=True)
    files.write(_cas(directory, ca.id, "key"), key_pem(ca.key), files.SECRET)
    files.write(_cas(directory, ca.id, "pem"), cert_pem(ca.cert), files.PUBLIC)
    return ca.id


def _read_ca(directory: Path, name: str) -> SigningCa:
    cert, key = _cas(directory, name, "pem"), _cas(directory, name, "key")
    if key.exists() and key.stat().st_mode & 0o077:
        raise InvalidInput(
            "CA key", str(key), "a file of mode 0600; who could read it can be anyone"
        )
    found = SigningCa(
        read_certs(files.read("CA", cert), cert)[0].cert, load_key(files.read("CA key", key), key)
    )
    if found.cert.public_key() != found.key.public_key() or found.id != name:
        raise CorruptRecord(f"{cert} and {key} are not the pair of CA {name}; restore a backup")
    return found


def _bundle(directory: Path, state: AuthorityState) -> bytes:
    return b"".join(files.read("CA", _cas(directory, name, "pem")) for name in state.trusted)


def _settle(directory: Path, state: AuthorityState) -> None:
    """Let the files be what the state says: the bundle, and no CA that it does not name."""
    files.write_if_other(directory / files.BUNDLE, _bundle(directory, state), files.PUBLIC)
    for file in (directory / _CAS).iterdir():
        if file.stem not in state.trusted:
            file.unlink()


def _cas(directory: Path, name: str, ending: str) -> Path:
    return directory / _CAS / f"{name}.{ending}"
