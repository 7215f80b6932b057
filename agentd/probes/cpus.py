"""Which CPUs there can be, are, are online, and are kept free of other work."""

from __future__ import annotations

import re

from agentd.core.fold import Facts
from agentd.core.isa import read_cpuinfo
from agentd.hostfs import HostFs
from agentd.probes.lists import list_in

BASE = "sys/devices/system/cpu"
_CPU = re.compile(r"cpu(\d+)\Z")
_FILES = ("present", "possible", "online", "offline", "isolated", "nohz_full", "kernel_max")
_CPUINFO_BYTES = 1 << 25
"""A thousand x86 CPUs write some 3 MB."""


def probe(host: HostFs, facts: Facts) -> None:
    """Fill the sets of CPUs, what cpuinfo tells, and which CPUs have directories."""
    info = read_cpuinfo(host.read("proc/cpuinfo", _CPUINFO_BYTES) or "", host.machine)
    facts.arch = info.arch
    facts.features = info.features
    facts.cpu_names = dict(info.names)
    facts.cpuinfo_cpus = info.cpus
    facts.parts = dict(info.parts)
    probe_sets(host, facts)
    if facts.online is None and info.cpus:
        facts.online = info.cpus
        facts.online_from = "cpuinfo"


def probe_sets(host: HostFs, facts: Facts) -> None:
    """Fill the sets alone: what hotplug changes."""
    for name in _FILES:
        text = host.attribute(f"{BASE}/{name}")
        if text is not None:
            facts.cpu_files[name] = text.strip()
    facts.cpu_directories = tuple(
        sorted(int(m[1]) for name in host.names(BASE) if (m := _CPU.match(name)))
    )
    facts.possible = _set(facts, "possible") or None
    facts.present = _set(facts, "present") or None
    facts.online = _set(facts, "online") or None
    facts.isolated = _set(facts, "isolated") or ()
    facts.nohz_full = _set(facts, "nohz_full") or ()
    if facts.online is None:
        facts.online = _from_directories(host, facts)
        facts.online_from = "cpuN/online + topology dir"
    else:
        online = set(facts.online)
        facts.without_topology = tuple(
            cpu
            for cpu in facts.cpu_directories
            if cpu not in online and not host.exists(f"{BASE}/cpu{cpu}/topology")
        )


def _set(facts: Facts, name: str) -> tuple[int, ...] | None:
    text = facts.cpu_files.get(name)
    return None if text is None else list_in(text, f"{BASE}/{name}", facts)


def _from_directories(host: HostFs, facts: Facts) -> tuple[int, ...] | None:
    """An offline CPU says so, or has no topology; cpu0 often has no `online` file at all."""
    facts.without_topology = tuple(
        cpu for cpu in facts.cpu_directories if not host.exists(f"{BASE}/cpu{cpu}/topology")
    )
    bare = set(facts.without_topology)
    if len(bare) == len(facts.cpu_directories):
        bare = set()
    return (
        tuple(
            cpu
            for cpu in facts.cpu_directories
            if cpu not in bare and (host.attribute(f"{BASE}/cpu{cpu}/online") or "1").strip() != "0"
        )
        or None
    )
