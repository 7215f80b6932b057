"""Reads a kernel list and survives one that is nonsense."""

from __future__ import annotations

from agentd.core.cpulist import parse_list
from agentd.core.topology import Facts
from agentd.hostfs import HostFs
from corefleet.errors import InvalidInput


def read_list(host: HostFs, path: str, facts: Facts) -> tuple[int, ...] | None:
    """Return the numbers listed in the file at `path`; None, with a warning, for nonsense."""
    text = host.read(path)
    return None if text is None else list_in(text, path, facts)


def list_in(text: str, where: str, facts: Facts) -> tuple[int, ...] | None:
    """Return the numbers that `text` lists; None, with a warning naming `where`."""
    try:
        return parse_list(text, where)
    except InvalidInput as error:
        facts.warnings.append(str(error))
        return None
