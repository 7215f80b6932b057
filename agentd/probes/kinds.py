"""What tells makes of cores apart: capacity, MIDR, x86's core types."""

from __future__ import annotations

from agentd.core.fold import Facts
from agentd.hostfs import HostFs
from agentd.probes.cpus import BASE
from agentd.probes.groups import ends
from agentd.probes.lists import read_list

_TYPES = {"performance": "cpu_core", "efficiency": "cpu_atom"}
"""x86 hybrid: one event source for each type, `cpus` lists its CPUs (perf's intel-hybrid)."""
_EVENT_SOURCES = ("sys/devices", "sys/bus/event_source/devices")


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `capacities`, `midrs`, `parts` and `efficient`."""
    told = any(host.exists(f"{BASE}/cpu{cpu}/cpu_capacity") for cpu in ends(facts))
    for cpu in (facts.online or ()) if told else ():
        capacity = (host.attribute(f"{BASE}/cpu{cpu}/cpu_capacity") or "").strip()
        if capacity.isdecimal():
            facts.capacities[cpu] = int(capacity)
    if facts.arch in {"aarch64", "arm", ""}:
        for cpu in facts.online or ():
            text = host.attribute(f"{BASE}/cpu{cpu}/regs/identification/midr_el1")
            if text:
                facts.midrs[cpu] = text.strip()
    if facts.arch in {"x86_64", "i686", ""} and not facts.midrs:
        _x86(host, facts)


def _x86(host: HostFs, facts: Facts) -> None:
    for base in _EVENT_SOURCES:
        types = {
            name: read_list(host, f"{base}/{source}/cpus", facts) for name, source in _TYPES.items()
        }
        if all(types.values()):
            for name, cpus in types.items():
                facts.parts.update(dict.fromkeys(cpus or (), name))
            facts.efficient = types["efficiency"] or ()
            return
    # Firmware gives each type its own nominal performance; the highest differs inside a type.
    nominal = {}
    for cpu in facts.online or ():
        text = (host.attribute(f"{BASE}/cpu{cpu}/acpi_cppc/nominal_perf") or "").strip()
        if not text.isdecimal():
            return
        nominal[cpu] = int(text)
    fastest = max(nominal.values(), default=0)
    if len(set(nominal.values())) > 1:
        facts.parts = {cpu: str(value) for cpu, value in nominal.items()}
        facts.efficient = tuple(cpu for cpu, value in nominal.items() if value < fastest)
