"""Which channels of a configuration are without TLS, and whether they may be.

Plain text needs `insecure = true`, and is then for addresses of this machine alone.
`insecure = "any-address"` lifts the second half, for closed networks of test machines.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from corefleet.config import Insecure, TlsConfig
from corefleet.errors import InvalidInput

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Channel:
    """The addresses that one key of a configuration names, and what secures them."""

    key: str
    addresses: Sequence[str]
    tls_key: str
    tls: TlsConfig | None


def check_channels(insecure: Insecure, channels: Iterable[Channel]) -> None:
    """Raise InvalidInput naming the key of a channel that is not secured as it must be."""
    for channel in channels:
        if channel.tls is not None:
            _check_paths(channel.tls_key, channel.tls)
            continue
        if not channel.addresses:
            continue
        if not insecure:
            raise InvalidInput(
                channel.tls_key, None,
                f"ca, cert and key for `{channel.key}`; for plain text on this machine "
                "`insecure = true`",
            )  # fmt: skip
        for address in channel.addresses:
            if insecure is True and not is_loopback(address):
                raise InvalidInput(
                    channel.key, address,
                    f"a loopback address, or `{channel.tls_key}`: plain text stays on a machine",
                )  # fmt: skip


def warn_of_plain_text(channels: Iterable[Channel]) -> None:
    """Say what goes over a network in plain text."""
    for channel in channels:
        plain = [each for each in channel.addresses if not is_loopback(each)]
        if channel.tls is None and plain:
            _log.warning(
                "plain text leaves this machine, for everyone to read and to write",
                key=channel.key,
                addresses=plain,
            )


def is_loopback(address: str) -> bool:
    """Whether a URL or host:port names this machine; a name other than localhost does not."""
    try:
        host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_paths(key: str, tls: TlsConfig) -> None:
    for part, path in (("ca", tls.ca), ("cert", tls.cert), ("key", tls.key)):
        if not Path(path).is_absolute():
            raise InvalidInput(f"{key}.{part}", path, "an absolute path")
