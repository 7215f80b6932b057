"""Which certificates are wanted: an identity and the hosts it listens on. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from corefleet.errors import InvalidInput
from corefleet.identity import Identity, Role

SERVERS: frozenset[Role] = frozenset({"controld", "agentd", "nats", "etcd"})
"""Roles that also listen. All roles connect: members of etcd and NATS do so to each other."""

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
_LONGEST_NAME = 253
_OUR_DOMAIN = "corefleet"


@dataclass(frozen=True, slots=True)
class Want:
    """A certificate that is wanted. `csr_pem` is there when the holder made its own key."""

    identity: Identity
    hosts: tuple[str, ...] = ()
    csr_pem: bytes | None = None


def check_hosts(role: Role, hosts: Iterable[str]) -> tuple[str, ...]:
    """Return `hosts` as a certificate spells them: lower case, addresses in short form, each once.

    Raises InvalidInput for what is neither an address nor a host's name, for a name that
    could be taken for an identity, and for hosts of a role that does not listen.
    """
    found = tuple(dict.fromkeys(_host(host) for host in hosts))
    if found and role not in SERVERS:
        raise InvalidInput(
            "hosts",
            ", ".join(found),
            f"none: {role} does not listen; {', '.join(sorted(SERVERS))} do",
        )
    return found


def is_address(host: str) -> bool:
    """Whether `host` is an IP address, and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _host_name(host)
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        raise InvalidInput("host", host, "an address without a zone: certificates have none")
    return str(address)


def _host_name(host: str) -> str:
    name = host.lower()
    labels = name.split(".")
    if len(name) > _LONGEST_NAME or not all(_LABEL.match(label) for label in labels):
        raise InvalidInput(
            "host", host, "an IP address, or a host name of a-z 0-9 - in labels of at most 63"
        )
    if labels[-1].isdigit():
        raise InvalidInput("host", host, "an IP address; the last label of a name is no number")
    if labels[-1] == _OUR_DOMAIN and len(labels) > 1:
        raise InvalidInput("host", host, f"a host, not an identity: *.{_OUR_DOMAIN} names holders")
    return name
