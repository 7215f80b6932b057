"""Public keys that tokens are signed with: a file, a JWKS or PEM, read anew when it changes."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
import msgspec
import structlog
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from corefleet.errors import ConfigError

ALGORITHMS = ("RS256", "ES256", "EdDSA")

_LOOK_S = 2.0
_LEAST_RSA_BITS = 2048
_MOST_BYTES = 1 << 20
_PEM_KEY = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)
_EXPECTED = "public keys for RS256 (2048 bits or more), ES256 or EdDSA, as a JWKS or as PEM"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenKey:
    """One public key. It serves one algorithm only, whatever a token's header asks for."""

    kid: str
    """Its name in a JWKS; a key in a PEM file has none."""
    algorithm: str
    key: Any


def parse_keys(data: bytes, where: str) -> tuple[TokenKey, ...]:
    """Return the keys of a JWKS (RFC 7517) or PEM file; raises ConfigError.

    Keys of a JWKS that are for something else are left out; private and secret keys are
    refused, for they do not belong on a server that only verifies.
    """
    if b"PRIVATE KEY" in data:
        raise ConfigError(f"{where}: holds a private key; expected {_EXPECTED}")
    keys = _from_pem(data, where) if b"-----BEGIN" in data else _from_jwks(data, where)
    if not keys:
        raise ConfigError(f"{where}: no usable key; expected {_EXPECTED}")
    names = [key.kid for key in keys if key.kid]
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: two keys have the same kid; expected one name for each key")
    return keys


def read_keys(path: Path) -> tuple[TokenKey, ...]:
    """Return the keys of a file; raises ConfigError. Reads it at once: not for an event loop."""
    return parse_keys(_read(path, None)[1], str(path))


def _read(path: Path, seen: object) -> tuple[object, bytes]:
    """Return what tells the file from an earlier one, and its content if it is another."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            found = (status.st_mtime_ns, status.st_size, status.st_ino)
            return found, b"" if found == seen else file.read(_MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: not readable: {error.strerror}") from error


def _from_pem(data: bytes, where: str) -> tuple[TokenKey, ...]:
    found = []
    for block in _PEM_KEY.findall(data):
        try:
            key = load_pem_public_key(block)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{where}: not a public key: {error}") from error
        algorithm = _algorithm(key)
        if not algorithm:
            raise ConfigError(f"{where}: a key of another kind; expected {_EXPECTED}")
        found.append(TokenKey("", algorithm, key))
    return tuple(found)


def _from_jwks(data: bytes, where: str) -> tuple[TokenKey, ...]:
    try:
        told = msgspec.json.decode(data, type=dict[str, Any])
        named = msgspec.convert(told.get("keys", [told]), list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: not a JWKS: {error}; expected {_EXPECTED}") from error
    found = []
    for each in named:
        if each.get("kty") == "oct" or "d" in each:
            raise ConfigError(f"{where}: holds a secret or private key; expected {_EXPECTED}")
        if each.get("use", "sig") != "sig" or each.get("alg", ALGORITHMS[0]) not in ALGORITHMS:
            continue
        try:
            key = jwt.PyJWK.from_dict(each).key
        except jwt.PyJWTError:
            # Of a kind that nobody here needs: the others may serve.
            continue
        algorithm = _algorithm(key)
        if algorithm and each.get("alg", algorithm) == algorithm:
            found.append(TokenKey(str(each.get("kid", "")), algorithm, key))
    return tuple(found)


def _algorithm(key: object) -> str:
    """Return the algorithm that a public key serves, '' when it is none of ours."""
    if isinstance(key, RSAPublicKey) and key.key_size >= _LEAST_RSA_BITS:
        return "RS256"
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return "ES256"
    return "EdDSA" if isinstance(key, Ed25519PublicKey) else ""


class KeyFile:
    """The keys of one file, as it was when it was last usable."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen: object = None
        self._trouble = ""
        self.keys: tuple[TokenKey, ...] = ()

    async def load(self) -> None:
        """Read the file for the first time; raises ConfigError."""
        self._seen, data = await asyncio.to_thread(_read, self._path, None)
        self.keys = parse_keys(data, str(self._path))

    async def look(self) -> None:
        """Read the file again if it has changed; what is not usable leaves the keys as they are."""
        try:
            seen, data = await asyncio.to_thread(_read, self._path, self._seen)
            if seen == self._seen:
                return
            self._seen = seen
            self.keys = parse_keys(data, str(self._path))
        except ConfigError as error:
            if str(error) != self._trouble:
                _log.error("keys of tokens stay as they were", error=str(error))
            self._trouble = str(error)
        else:
            self._trouble = ""
            _log.info("keys of tokens read", keys=len(self.keys))

    async def keep_current(self) -> None:
        """Look at the file every two seconds, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()
