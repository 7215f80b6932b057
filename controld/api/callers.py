"""Who calls: the holder of the client certificate, or the subject of a token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controld.core.grants import ANONYMOUS, Who
from controld.token_keys import KeyFile
from controld.tokens import Verifier
from corefleet.background import Background, stop
from corefleet.clock import Clock
from corefleet.config import TokenConfig
from corefleet.errors import Unauthenticated
from corefleet.identity import find_identity

_HEADER = "authorization"
_SCHEME = "bearer "
_CERTIFICATES_KEPT = 1024

AuthContext = Mapping[str, Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `name` is what messages, audit log and `submitted_by` call it.

    Names of certificates' holders are `<role>/<name>`, those of tokens' subjects
    `subject:<subject>`: neither can be taken for the other.
    """

    name: str
    who: Who
    beside: str = ""
    """The certificate's identity, when a token's subject speaks."""
    until_s: float = 0.0
    """Wall-clock seconds at which the token is void; 0: never."""

    @property
    def identity(self) -> str:
        """The holder of the certificate, '' without one."""
        return self.beside or ("" if self.who.identity == ANONYMOUS else self.who.identity)


class Authenticator:
    """Says who calls, from what gRPC knows of the connection and from the call's metadata."""

    def __init__(self, clock: Clock, background: Background, tokens: TokenConfig | None) -> None:
        self._clock = clock
        self._background = background
        self._verifier = Verifier(tokens) if tokens is not None else None
        self._file = KeyFile(tokens.keys) if tokens is not None else None
        self._watching: asyncio.Task[None] | None = None
        self._holders: dict[tuple[bytes, ...], str] = {}

    async def start(self) -> None:
        """Read the keys of tokens, and read them again when they change. Raises ConfigError."""
        if self._file is not None:
            await self._file.load()
            self._watching = self._background.spawn(self._file.keep_current(), "keys of tokens")

    async def close(self) -> None:
        """Look at the keys no more. Idempotent."""
        await stop(self._watching)

    def caller(self, metadata: Iterable[tuple[str, str | bytes]], auth: AuthContext) -> Caller:
        """Return who calls; raises Unauthenticated, which says what is missing or wrong.

        `auth` is what gRPC's auth_context() says of the connection.
        """
        plain = b"ssl" not in auth.get("transport_security_type", ())
        identity = "" if plain else self._holder(tuple(auth.get("peer_dns", ())))
        token = _token(metadata)
        if token is not None:
            return self._bearer(token, identity, plain)
        if identity:
            return Caller(identity, Who(identity=identity))
        if plain:
            return Caller(ANONYMOUS, Who(identity=ANONYMOUS, plain=True))
        raise Unauthenticated(
            "the client certificate names nobody (no DNS name <name>.<role>.corefleet), and "
            "there is no token (metadata `authorization: Bearer ...`)"
        )

    def _bearer(self, token: str, identity: str, plain: bool) -> Caller:
        if self._verifier is None or self._file is None:
            raise Unauthenticated("token: this controld takes none ([auth.tokens] is not set)")
        found = self._verifier.bearer(token, self._file.keys, self._clock.wall_ms() / 1000)
        return Caller(
            f"subject:{found.subject}",
            Who(subject=found.subject, groups=found.groups, plain=plain),
            beside=identity,
            until_s=found.until_s,
        )

    def _holder(self, names: tuple[bytes, ...]) -> str:
        found = self._holders.get(names)
        if found is None:
            identity = find_identity(name.decode("ascii", "replace") for name in names)
            found = str(identity) if identity is not None else ""
            if len(self._holders) >= _CERTIFICATES_KEPT:
                self._holders.clear()
            self._holders[names] = found
        return found


def _token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    values = [value for key, value in metadata if key == _HEADER]
    if not values:
        return None
    value = values[0]
    if len(values) > 1 or not isinstance(value, str) or not value.lower().startswith(_SCHEME):
        raise Unauthenticated(f"metadata `{_HEADER}`: expected one value, `Bearer <token>`")
    return value[len(_SCHEME) :].strip()
