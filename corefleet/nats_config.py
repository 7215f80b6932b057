"""The configuration of nats-server: mutual TLS, and one user for each holder of a certificate.

Pure, and sorted: the same members give the same text, byte for byte. docs/security.md says
why there is an entry for each node.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from corefleet.errors import InvalidInput
from corefleet.identity import Identity
from corefleet.ids import check_name
from corefleet.permissions import RESPONSE_EXPIRES_S, Permissions, permissions_of
from corefleet.subjects import ANY

ACCOUNT = "COREFLEET"
SYSTEM_ACCOUNT = "SYS"
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
HANDSHAKE_S = 10
"""After a server's restart all nodes of a fleet shake hands at once."""
ROUTE_USER = "CN=nats,O=corefleet"
"""The subject of certificates for the role nats, as the server spells it: only a NATS server
may join the cluster, where no permission binds it."""


@dataclass(frozen=True, slots=True)
class Member:
    """A user of NATS. `rack` is where a node belongs; ANY: it may beat in any rack."""

    identity: Identity
    rack: str = ANY


@dataclass(frozen=True, slots=True)
class NatsServerPlan:
    """One server. Addresses are host:port; `cluster_listen` '' makes it a server on its own.

    `routes` are the cluster addresses of all servers, by the names in their certificates.
    """

    name: str
    listen: str
    store_dir: str
    monitor: str = ""
    """On a loopback address only, as it is plain text; '' serves none."""
    ca: str = "/etc/corefleet/pki/ca.pem"
    cert: str = "/etc/corefleet/pki/nats.pem"
    key: str = "/etc/corefleet/pki/nats.key"
    cluster_listen: str = ""
    routes: tuple[str, ...] = ()
    max_file_bytes: int = 0
    """Of JetStream's files; 0 leaves it to the server: three quarters of the disk."""
    max_memory_bytes: int = 256 * 1024 * 1024
    """Of JetStream's streams and consumers in memory."""


def parse_nodes(text: str) -> list[Member]:
    """Return the nodes of a list: a line each, `NODE RACK` or `NODE`; `#` begins a comment.

    Raises InvalidInput naming the line.
    """
    found: dict[str, Member] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise InvalidInput(f"node list, line {number}", line.strip(), "NODE RACK, or NODE")
        node, rack = words[0], words[1] if len(words) == 2 else ANY
        check_name(f"node list, line {number}", node)
        if rack != ANY:
            check_name(f"node list, line {number}", rack)
        if node in found:
            raise InvalidInput(f"node list, line {number}", node, "each node once")
        found[node] = Member(Identity("agentd", node), rack)
    return list(found.values())


def render(plan: NatsServerPlan, members: Iterable[Member]) -> str:
    """Return nats.conf; raises InvalidInput for a plan or members that cannot be."""
    _check(plan)
    lines = [
        "# Made by `agentctl nats-config`; what is changed by hand is lost with the next one.",
        f"server_name: {_text(check_name('name', plan.name))}",
        f"listen: {_text(plan.listen)}",
        f"max_payload: {MAX_PAYLOAD_BYTES}",
    ]
    if plan.monitor:
        lines.append(f"http: {_text(plan.monitor)}")
    lines += [
        _tls(plan, "tls"),
        f"authorization {{ timeout: {2 * HANDSHAKE_S} }}",
        _jetstream(plan),
    ]
    if plan.cluster_listen:
        lines += _cluster(plan)
    lines += [
        f"system_account: {SYSTEM_ACCOUNT}",
        "accounts {",
        f"  {SYSTEM_ACCOUNT} {{}}",
        f"  {ACCOUNT} {{",
        "    jetstream: enabled",
        "    users: [",
        *_users(members),
        "    ]",
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _check(plan: NatsServerPlan) -> None:
    addresses = {"listen": plan.listen, "monitor": plan.monitor, "cluster": plan.cluster_listen}
    for field, address in addresses.items():
        if address or field == "listen":
            _check_address(field, address)
    if plan.monitor and _host(plan.monitor) not in ("127.0.0.1", "localhost", "[::1]"):
        raise InvalidInput("monitor", plan.monitor, "a loopback address: it is plain text")
    if plan.routes and not plan.cluster_listen:
        raise InvalidInput("cluster", "", "an address to listen on, as there are routes")
    if plan.cluster_listen and not plan.routes:
        raise InvalidInput("routes", "none", "the cluster addresses of all servers")
    for route in plan.routes:
        _check_address("route", route)


def _check_address(field: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(field, address, "host:port")


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _tls(plan: NatsServerPlan, name: str) -> str:
    return (
        f"{name} {{ ca_file: {_text(plan.ca)}, cert_file: {_text(plan.cert)}, "
        f'key_file: {_text(plan.key)}, verify_and_map: true, min_version: "1.3", '
        f"timeout: {HANDSHAKE_S} }}"
    )


def _jetstream(plan: NatsServerPlan) -> str:
    limits = [f"max_memory_store: {plan.max_memory_bytes}"]
    if plan.max_file_bytes:
        limits.append(f"max_file_store: {plan.max_file_bytes}")
    return f"jetstream {{ store_dir: {_text(plan.store_dir)}, {', '.join(limits)} }}"


def _cluster(plan: NatsServerPlan) -> list[str]:
    routes = ", ".join(_text(f"nats-route://{route}") for route in sorted(plan.routes))
    return [
        "cluster {",
        "  name: corefleet",
        f"  listen: {_text(plan.cluster_listen)}",
        f"  {_tls(plan, 'tls')}",
        f"  authorization {{ user: {_text(ROUTE_USER)}, timeout: {2 * HANDSHAKE_S} }}",
        f"  routes: [{routes}]",
        "}",
    ]


def _users(members: Iterable[Member]) -> list[str]:
    users: dict[str, str] = {}
    for member in sorted(members, key=lambda each: each.identity.dns_name):
        name = member.identity.dns_name
        allowed = permissions_of(member.identity, member.rack)
        if allowed is None:
            raise InvalidInput("member", str(member.identity), "a role that uses NATS")
        if name in users:
            raise InvalidInput("member", str(member.identity), "each holder once")
        users[name] = f"      {{ user: {_text(name)}, permissions: {_permissions(allowed)} }}"
    return list(users.values())


def _permissions(allowed: Permissions) -> str:
    parts = [
        f"publish: {{ allow: {_texts(allowed.publish)} }}",
        f"subscribe: {{ allow: {_texts(allowed.subscribe)} }}",
    ]
    if allowed.responses:
        parts.append(f'allow_responses: {{ max: 1, expires: "{RESPONSE_EXPIRES_S}s" }}')
    return f"{{ {', '.join(parts)} }}"


def _texts(values: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def _text(value: str) -> str:
    """Quote a text: unquoted, nats-server takes `$` for a variable."""
    return json.dumps(value)
