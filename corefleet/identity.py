"""Who a certificate says its holder is.

A certificate of corefleet names its holder in two places. The subject's CN is the role: etcd
takes it as the user. A DNS name among the subject alternative names, `<name>.<role>.corefleet`,
is the identity: NATS takes it as the user (`verify_and_map`), and controld reads it from a
gRPC peer. The other DNS names and IP addresses of a server's certificate are where it listens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from corefleet.errors import InvalidInput
from corefleet.ids import check_name

Role = Literal["controld", "agentd", "client", "operator", "monitor", "nats", "etcd"]
"""`client` submits tasks, `operator` does all that agentctl can, `monitor` reads metrics."""
ROLES: tuple[Role, ...] = get_args(Role)

_DOMAIN = "corefleet"


@dataclass(frozen=True, slots=True)
class Identity:
    """One holder of a certificate, e.g. `node-0001` in the role `agentd`."""

    role: Role
    name: str

    @property
    def dns_name(self) -> str:
        """The name that stands for it in a certificate, and as a user of NATS."""
        return f"{self.name}.{self.role}.{_DOMAIN}"

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


def parse_identity(dns_name: str) -> Identity:
    """Return whom `<name>.<role>.corefleet` names; raises InvalidInput."""
    name, _, rest = dns_name.partition(".")
    role, _, domain = rest.partition(".")
    if domain != _DOMAIN or role not in ROLES:
        raise InvalidInput(
            "identity", dns_name, f"<name>.<role>.{_DOMAIN}, with a role of {', '.join(ROLES)}"
        )
    return Identity(role, check_name("identity", name))


def find_identity(dns_names: Iterable[str]) -> Identity | None:
    """Return the identity among a certificate's DNS names; None without one, or with several."""
    found = []
    for each in dns_names:
        try:
            found.append(parse_identity(each))
        except InvalidInput:
            # Most names of a server's certificate are hosts.
            continue
    return found[0] if len(found) == 1 else None
