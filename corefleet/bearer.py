"""Tokens that a client brings with its calls."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from typing import Any

from corefleet.errors import InvalidInput

Token = Callable[[], str]
"""Returns the token to bring now."""

_HEADER = "authorization"


def check_token(addresses: Sequence[str]) -> None:
    """Raise InvalidInput if tokens would go over a network that others can listen on."""
    for address in addresses:
        host = address.rpartition(":")[0].strip("[]")
        if not _is_loopback(host):
            raise InvalidInput(
                "addresses", address, "an address of this machine: tokens need TLS elsewhere"
            )


class _Bearer:
    """A stub whose calls bring a token, read anew for each."""

    def __init__(self, token: Token, stub: Any) -> None:
        self._token = token
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)

        def call(request: Any, timeout: float | None = None) -> Any:
            metadata = ((_HEADER, f"Bearer {self._token()}"),)
            return method(request, timeout=timeout, metadata=metadata)

        return call


def stub_with(token: Token | None, stub: Any) -> Any:
    """Return `stub`, or one that brings `token` with each call."""
    return stub if token is None else _Bearer(token, stub)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
