"""The certificates of mutual TLS as files: read, checked, and read anew when they were replaced.

A program holds one `TlsFiles` for each place where its configuration names files, and asks it
for the `current()` material whenever it makes a connection or begins to serve one. Looking costs
three stat calls, once a second at most; what does not fit together is never handed out.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from corefleet.errors import ConfigError

LOOK_EVERY_S = 1.0
"""How often the files are looked at, at most."""
EXPIRES_SOON = datetime.timedelta(days=14)
_KEEP_LOOKING_S = 10.0
_WARN_EVERY_S = 86_400.0

_log = structlog.get_logger(__name__)

_Marks = tuple[tuple[int, int, int], ...]


class NamedFiles(Protocol):
    """What names the three PEM files; corefleet.config.TlsConfig does."""

    @property
    def ca(self) -> str: ...

    @property
    def cert(self) -> str: ...

    @property
    def key(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Material:
    """The bytes of three PEM files that fit together. Each new one has the next number."""

    number: int
    ca: bytes
    cert: bytes
    key: bytes
    expires: datetime.datetime

    def client_context(self) -> ssl.SSLContext:
        """Return a context for connections that we open: TLS 1.3, the peer's name checked."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server_context(self) -> ssl.SSLContext:
        """Return a context for connections that we accept: TLS 1.3, with client certificates."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.ca.decode("ascii", "ignore"))
        # OpenSSL takes a pair as files only, and those on disk may be others by now.
        held = os.memfd_create("pair", os.MFD_CLOEXEC)
        try:
            os.write(held, self.key + b"\n" + self.cert)
            context.load_cert_chain(f"/dev/fd/{held}")
        finally:
            os.close(held)
        return context


class TlsFiles:
    """PEM files that may be replaced at any time. Any thread may call.

    `ca` holds one or more certificates that we believe, `cert` our own and those between it
    and its CA, `key` the private key of `cert`. Raises ConfigError, naming file and reason,
    when they cannot be used; later, what cannot be used is warned of and the former stays.
    """

    def __init__(self, ca: str | Path, cert: str | Path, key: str | Path) -> None:
        self.ca, self.cert, self.key = Path(ca), Path(cert), Path(key)
        self._lock = threading.Lock()
        self._seen = self._marks()
        self._refused: _Marks = ()
        self._told: _Marks = ()
        self._material = self._read(1)
        self._look_at = time.monotonic() + LOOK_EVERY_S
        self._warn_at = 0.0
        self._contexts: tuple[Material, ssl.SSLContext, ssl.SSLContext] | None = None
        self._warn_of_end()

    @classmethod
    def of(cls, named: NamedFiles | None) -> Self | None:
        """Return the files that a configuration names, None when it names none."""
        return None if named is None else cls(named.ca, named.cert, named.key)

    def current(self) -> Material:
        """Return what the files hold, or held when they last fitted together."""
        if time.monotonic() >= self._look_at:
            self.look()
        return self._material

    def client_context(self) -> ssl.SSLContext:
        """Return the context of the current material for connections that we open."""
        return self._current_contexts()[1]

    def server_context(self) -> ssl.SSLContext:
        """Return the context of the current material for connections that we accept."""
        return self._current_contexts()[2]

    def look(self) -> bool:
        """Read the files if they are others now; return whether there is new material."""
        with self._lock:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._warn_of_end()
            marks = self._marks()
            if marks == self._seen:
                return False
            try:
                found = self._read(self._material.number + 1)
            except ConfigError as error:
                # Files are replaced one after the other: only what stays wrong is worth a word.
                if marks == self._refused and marks != self._told:
                    self._told = marks
                    _log.warning("certificates not taken up: the former stay", reason=str(error))
                self._refused = marks
                return False
            self._seen = marks
            before = self._material
            if (found.ca, found.cert, found.key) == (before.ca, before.cert, before.key):
                return False
            self._material = found
            self._warn_at = 0.0
            _log.info("certificates read anew", cert=str(self.cert), expires=str(found.expires))
            self._warn_of_end()
            return True

    async def keep_looking(self) -> None:
        """Look for ever, for a process that may make no connection for long: to warn in time."""
        while True:
            await asyncio.sleep(_KEEP_LOOKING_S)
            self.look()

    def _current_contexts(self) -> tuple[Material, ssl.SSLContext, ssl.SSLContext]:
        material = self.current()
        made = self._contexts
        if made is None or made[0] is not material:
            made = (material, material.client_context(), material.server_context())
            self._contexts = made
        return made

    def _marks(self) -> _Marks:
        return tuple(_mark(path) for path in (self.ca, self.cert, self.key))

    def _read(self, number: int) -> Material:
        ca, cert, key = (_bytes_of(path) for path in (self.ca, self.cert, self.key))
        now = datetime.datetime.now(datetime.UTC)
        trusted = _certificates(self.ca, ca)
        if all(each.not_valid_after_utc <= now for each in trusted):
            raise ConfigError(
                f"{self.ca}: every certificate in it has expired; expected a CA that is valid"
            )
        own = _certificates(self.cert, cert)[0]
        try:
            private = serialization.load_pem_private_key(key, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            # The library's reason may quote the file, which is secret.
            raise ConfigError(
                f"{self.key}: no private key; expected PEM without a password"
            ) from None
        if private.public_key() != own.public_key():
            raise ConfigError(
                f"{self.key}: does not fit the certificate {self.cert}; "
                "expected the key that it was issued for"
            )
        if own.not_valid_after_utc <= now:
            raise ConfigError(
                f"{self.cert}: expired at {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
                "expected a certificate that is valid"
            )
        if own.not_valid_before_utc > now:
            raise ConfigError(
                f"{self.cert}: not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; "
                "is this machine's clock right?"
            )
        return Material(number, ca, cert, key, own.not_valid_after_utc)

    def _warn_of_end(self) -> None:
        left = self._material.expires - datetime.datetime.now(datetime.UTC)
        if left > EXPIRES_SOON or time.monotonic() < self._warn_at:
            return
        self._warn_at = time.monotonic() + _WARN_EVERY_S
        _log.warning(
            "certificate expires soon" if left.total_seconds() > 0 else "certificate has expired",
            cert=str(self.cert),
            expires=f"{self._material.expires:%Y-%m-%d %H:%M} UTC",
        )


def _mark(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: not readable: {error.strerror}") from error


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{path}: no certificate; expected PEM") from error
