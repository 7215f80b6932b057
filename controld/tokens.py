"""JSON web tokens (RFC 7519, RFC 8725): whose they are, when they are what they should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jwt

from controld.token_keys import ALGORITHMS, TokenKey
from corefleet.config import TokenConfig
from corefleet.errors import Unauthenticated

_KEPT = 4096
_MOST_BYTES = 16 * 1024
_MOST_GROUPS = 256
_LONGEST_NAME = 256
_END_OF_TIME_S = 253_402_300_799
"""The last second of the year 9999."""

_REASONS: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.ExpiredSignatureError, "it has expired"),
    (jwt.ImmatureSignatureError, "it is not valid yet; is a clock wrong?"),
    (jwt.InvalidAudienceError, "it is for another audience; expected {audience!r}"),
    (jwt.InvalidIssuerError, "it is of another issuer; expected {issuer!r}"),
    (jwt.InvalidSignatureError, "its signature is not that of the key"),
    (jwt.MissingRequiredClaimError, "it lacks one of the claims exp, iss, aud"),
)


@dataclass(frozen=True, slots=True)
class Bearer:
    """Whom a token that was verified names."""

    subject: str
    groups: tuple[str, ...]
    until_s: float
    """Wall-clock seconds until which it may be used, the leeway included."""


class Verifier:
    """Verifies tokens; those that come again are looked up until they expire.

    A message never holds any part of a token but its `kid` and `alg`.
    """

    def __init__(self, config: TokenConfig) -> None:
        self._config = config
        self._keys: tuple[TokenKey, ...] = ()
        self._known: dict[str, Bearer] = {}

    def bearer(self, token: str, keys: tuple[TokenKey, ...], now_s: float) -> Bearer:
        """Return whom `token`, signed with one of `keys`, names; raises Unauthenticated.

        What was verified with other keys is verified anew.
        """
        if keys is not self._keys:
            self._keys = keys
            self._known.clear()
        found = self._known.get(token)
        if found is not None and now_s < found.until_s:
            return found
        found = self._verify(token)
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[token] = found
        return found

    def _verify(self, token: str) -> Bearer:
        config = self._config
        if len(token) > _MOST_BYTES:
            raise Unauthenticated(f"token: {len(token)} bytes; expected at most {_MOST_BYTES}")
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            raise Unauthenticated("token: not a JSON web token") from None
        wrong: jwt.PyJWTError | None = None
        for key in self._candidates(header):
            try:
                claims = jwt.decode(
                    token,
                    key.key,
                    algorithms=[key.algorithm],
                    issuer=config.issuer,
                    audience=config.audience,
                    leeway=config.leeway_s,
                    options={"require": ["exp", "iss", "aud"]},
                )
            except jwt.InvalidSignatureError as error:
                wrong = error
                continue
            except jwt.PyJWTError as error:
                wrong = error
                break
            except OverflowError:
                # A time beyond all numbers.
                break
            return self._bearer(claims)
        raise Unauthenticated(f"token: {self._reason(wrong)}") from None

    def _candidates(self, header: dict[str, Any]) -> Sequence[TokenKey]:
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in ALGORITHMS:
            raise Unauthenticated(
                f"token: alg {_shown(algorithm)}; expected one of {', '.join(ALGORITHMS)}"
            )
        named = [key for key in self._keys if key.kid and key.kid == kid]
        # A key of a PEM file has no name; a JWKS of one key needs none.
        found = named or [
            key
            for key in self._keys
            if not key.kid or (kid is None and len(self._keys) == 1)
        ]  # fmt: skip
        found = [key for key in found if key.algorithm == algorithm]
        if not found:
            raise Unauthenticated(
                f"token: no key here has the kid {_shown(kid)} and is for {algorithm}"
            )
        return found

    def _reason(self, error: jwt.PyJWTError | None) -> str:
        for kind, reason in _REASONS:
            if isinstance(error, kind):
                return reason.format(audience=self._config.audience, issuer=self._config.issuer)
        return "its claims or its header are not as they should be"

    def _bearer(self, claims: dict[str, Any]) -> Bearer:
        config = self._config
        subject = claims.get(config.subject_claim)
        if not _is_name(subject):
            raise Unauthenticated(f"token: claim {config.subject_claim}: no name in it")
        groups = claims.get(config.groups_claim, [])
        groups = [groups] if isinstance(groups, str) else groups
        if not (
            isinstance(groups, list)
            and len(groups) <= _MOST_GROUPS
            and all(_is_name(group) for group in groups)
        ):
            raise Unauthenticated(
                f"token: claim {config.groups_claim}: expected at most {_MOST_GROUPS} names"
            )
        until_s = min(float(claims["exp"]), _END_OF_TIME_S) + config.leeway_s
        return Bearer(str(subject), tuple(groups), until_s)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and value.isprintable()


def _shown(value: object) -> str:
    return repr(value)[:_LONGEST_NAME]
