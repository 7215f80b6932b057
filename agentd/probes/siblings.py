"""Which CPUs are threads of one physical core."""

from __future__ import annotations

from agentd.core.fold import Facts
from agentd.hostfs import HostFs
from agentd.probes.groups import candidates, members_of

_FILES = ("core_cpus", "thread_siblings")


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `siblings` for each online CPU: each is asked, for some contradict each other."""
    online = set(facts.online or ())
    files = candidates(_FILES)
    for cpu in facts.online or ():
        core = members_of(host, facts, cpu, files)
        facts.siblings[cpu] = tuple(c for c in core if c in online) or (cpu,)
