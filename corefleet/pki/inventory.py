"""Lists of wanted certificates: tab-separated lines or JSON lines. Pure.

agentd<TAB>node-0001<TAB>node-0001.example.org,10.0.0.1
{"role": "agentd", "name": "node-0001", "hosts": ["node-0001.example.org", "10.0.0.1"]}
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from corefleet.errors import InvalidInput
from corefleet.identity import Identity, Role
from corefleet.ids import check_name
from corefleet.pki.wants import Want, check_hosts

_COLUMNS = ("role", "name", "hosts")
_BETWEEN_HOSTS = re.compile(r"[,\s]+")


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line: who, and where it listens."""

    role: Role
    name: str
    hosts: tuple[str, ...] = ()


def want(role: Role, name: str, hosts: Sequence[str]) -> Want:
    """Return a checked want; raises InvalidInput."""
    return Want(Identity(role, check_name("name", name)), check_hosts(role, hosts))


def parse(text: str, source: str) -> list[Want]:
    """Return what a list asks for; blank lines and those after `#` are skipped.

    Raises InvalidInput naming source, line and what would be right.
    """
    wants: dict[Identity, Want] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{source}, line {number}"
        try:
            parsed = _line(line)
            found = want(parsed.role, parsed.name, parsed.hosts)
        except (InvalidInput, msgspec.DecodeError) as error:
            raise InvalidInput(where, line, f"role, name and hosts: {error}") from None
        if found.identity in wants:
            raise InvalidInput(where, str(found.identity), "each identity once")
        wants[found.identity] = found
    return list(wants.values())


def _line(line: str) -> Line:
    if line.lstrip().startswith("{"):
        return msgspec.json.decode(line, type=Line)
    columns = line.strip(" ").split("\t")
    if not 2 <= len(columns) <= len(_COLUMNS):
        raise InvalidInput("columns", len(columns), "2 or 3, with one tab between them")
    fields: dict[str, object] = dict(zip(_COLUMNS, columns, strict=False))
    fields["hosts"] = (
        [host for host in _BETWEEN_HOSTS.split(columns[2]) if host]
        if (len(columns) == len(_COLUMNS))
        else []
    )
    return msgspec.convert(fields, Line)
