"""Somebody who issues tokens, with keys of every kind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from corefleet.config import TokenConfig

ISSUER = "https://issuer.example"

_ALGORITHMS: dict[str, Any] = {
    "RS256": jwt.algorithms.RSAAlgorithm,
    "ES256": jwt.algorithms.ECAlgorithm,
    "EdDSA": jwt.algorithms.OKPAlgorithm,
}


class Issuer:
    """Issues tokens signed with one key."""

    def __init__(self, algorithm: str = "ES256", kid: str = "k1", key: Any = None) -> None:
        self.algorithm = algorithm
        self.kid = kid
        self.key = key or new_key(algorithm)

    def jwk(self, **more: str) -> dict[str, Any]:
        """Return the public key as a JWK."""
        made = json.loads(_ALGORITHMS[self.algorithm].to_jwk(self.key.public_key()))
        return {**made, "kid": self.kid, "use": "sig", **more}

    def pem(self) -> bytes:
        """Return the public key as PEM."""
        made: bytes = self.key.public_key().public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )
        return made

    def token(
        self, subject: str = "bob", *, headers: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """Return a token that is good for an hour; a claim of None is left out."""
        told = {
            "iss": ISSUER,
            "aud": "corefleet",
            "sub": subject,
            "iat": int(time.time()),
            "exp": int(time.time()) + 3600,
            **claims,
        }
        kept = {name: value for name, value in told.items() if value is not None}
        named = {"kid": self.kid} if headers is None else headers
        return jwt.encode(kept, self.key, self.algorithm, headers=named)


def new_key(algorithm: str) -> Any:
    """Return a private key for `algorithm`."""
    match algorithm:
        case "RS256":
            return rsa.generate_private_key(65537, 2048)
        case "ES256":
            return ec.generate_private_key(ec.SECP256R1())
        case _:
            return ed25519.Ed25519PrivateKey.generate()


def write_jwks(path: Path, *issuers: Issuer) -> TokenConfig:
    """Write the issuers' keys to `path`; return what a controld that takes their tokens is told."""
    path.write_text(json.dumps({"keys": [each.jwk() for each in issuers]}), encoding="utf-8")
    return TokenConfig(keys=str(path), issuer=ISSUER)
