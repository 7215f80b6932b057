"""Which CPUs there can be and which are online."""

from __future__ import annotations

from agentd.core.topology import Facts
from agentd.hostfs import HostFs
from agentd.probes.lists import read_list


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `possible` and `online`."""
    facts.possible = read_list(host, "sys/devices/system/cpu/possible", facts) or None
    facts.online = read_list(host, "sys/devices/system/cpu/online", facts) or None
    if facts.online is None:
        facts.online = _from_cpuinfo(host)


def _from_cpuinfo(host: HostFs) -> tuple[int, ...] | None:
    found = set()
    for line in (host.read("proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "processor" and value.strip().isdecimal():
            found.add(int(value))
    return tuple(sorted(found)) or None
