"""Certificates of a fleet on one machine: written where its programs are told to find them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from corefleet.config import TlsConfig
from corefleet.identity import Identity, Role

_HOSTS = ("127.0.0.1", "localhost")
_LISTENING: tuple[Role, ...] = ("controld", "agentd", "nats", "etcd")


class Pair(Protocol):
    """A certificate and its private key, as PEM."""

    @property
    def cert_pem(self) -> bytes: ...

    @property
    def key_pem(self) -> bytes: ...


class Issuer(Protocol):
    """Who makes certificates."""

    @property
    def bundle_pem(self) -> bytes: ...

    def issue(self, identity: Identity, hosts: Sequence[str] = ()) -> Pair:
        """Return a new certificate for `identity`, who listens on `hosts`."""


class Certificates:
    """The files below one directory: `ca.pem` for all, `<role>-<name>.pem` and `.key`."""

    def __init__(self, directory: Path, issuer: Issuer) -> None:
        self._directory = directory
        self._issuer = issuer
        self._issued: set[Identity] = set()
        directory.mkdir(parents=True, exist_ok=True)
        self.trust(issuer)

    def files(self, role: Role, name: str) -> TlsConfig:
        """Return the files of one holder, made when they are first asked for."""
        identity = Identity(role, name)
        if identity not in self._issued:
            self._issued.add(identity)
            self._write(identity)
        stem = self._stem(identity)
        return TlsConfig(ca=str(self._ca), cert=f"{stem}.pem", key=f"{stem}.key")

    def trust(self, *issuers: Issuer) -> None:
        """Believe these, and nobody else."""
        _replace(self._ca, b"".join(each.bundle_pem for each in issuers))

    def reissue(self, issuer: Issuer) -> None:
        """Replace all that was issued."""
        self._issuer = issuer
        for identity in self._issued:
            self._write(identity)

    @property
    def _ca(self) -> Path:
        return self._directory / "ca.pem"

    def _stem(self, identity: Identity) -> Path:
        return self._directory / f"{identity.role}-{identity.name}"

    def _write(self, identity: Identity) -> None:
        pair = self._issuer.issue(identity, _HOSTS if identity.role in _LISTENING else ())
        stem = self._stem(identity)
        _replace(Path(f"{stem}.key"), pair.key_pem)
        _replace(Path(f"{stem}.pem"), pair.cert_pem)


def tls_lines(key: str, files: TlsConfig) -> str:
    """Return the lines of TOML that name `files` under `key`."""
    parts = (("ca", files.ca), ("cert", files.cert), ("key", files.key))
    return "".join(f"{key}.{part} = {json.dumps(path)}\n" for part, path in parts)


def _replace(path: Path, content: bytes) -> None:
    """Write at once, for readers that may come at any time; for nobody else's eyes."""
    new = path.with_name(f"{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(new, path)
