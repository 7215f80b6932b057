"""Which CPUs are threads of one physical core."""

from __future__ import annotations

from agentd.core.topology import Facts
from agentd.hostfs import HostFs
from agentd.probes.lists import list_in

_FILES = ("core_cpus_list", "thread_siblings_list")


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `siblings` for each online CPU."""
    for cpu in facts.online or ():
        base = f"sys/devices/system/cpu/cpu{cpu}/topology"
        for name in _FILES:
            text = host.read(f"{base}/{name}")
            if text is not None:
                facts.siblings[cpu] = list_in(text, f"{base}/{name}", facts) or (cpu,)
                break
        else:
            facts.siblings[cpu] = (cpu,)
