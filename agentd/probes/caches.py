"""Groups of CPUs that share a level 3 cache."""

from __future__ import annotations

import re

from agentd.core.fold import Facts
from agentd.core.topology import CacheGroup
from agentd.hostfs import HostFs
from agentd.probes.cpus import BASE
from agentd.probes.groups import ends
from agentd.probes.lists import read_list, read_mask

_LEVEL = "3"
_USUAL = "index3"
_SIZE = re.compile(r"(\d+)([KMG]?)\Z")
_KILOBYTES = {"": 1 / 1024, "K": 1, "M": 1024, "G": 1024 * 1024}


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `caches`: by the CPUs they name, for many have no id. Asks one CPU of each."""
    if not any(host.exists(f"{BASE}/cpu{cpu}/cache") for cpu in ends(facts)):
        return
    online = set(facts.online or ())
    seen: set[int] = set()
    for cpu in facts.online or ():
        if cpu in seen:
            continue
        base = _last_level(host, cpu)
        if base is None:
            continue
        cpus = read_list(host, f"{base}/shared_cpu_list", facts)
        if cpus is None:
            cpus = read_mask(host, f"{base}/shared_cpu_map", facts)
        group = tuple(c for c in cpus or (cpu,) if c in online and c not in seen) or (cpu,)
        seen.update(group)
        number = (host.attribute(f"{base}/id") or "").strip()
        facts.caches.append(
            CacheGroup(
                cpus=group,
                size_kb=_kilobytes(host.attribute(f"{base}/size") or ""),
                cache=int(number) if number.isdecimal() else None,
            )
        )


def _last_level(host: HostFs, cpu: int) -> str | None:
    """An index is a position in the list of caches and no level: the file `level` tells."""
    base = f"{BASE}/cpu{cpu}/cache"
    if (host.attribute(f"{base}/{_USUAL}/level") or "").strip() == _LEVEL:
        return f"{base}/{_USUAL}"
    for name in host.names(base):
        if (host.attribute(f"{base}/{name}/level") or "").strip() == _LEVEL:
            return f"{base}/{name}"
    return None


def _kilobytes(text: str) -> int | None:
    match = _SIZE.match(text.strip())
    return int(int(match[1]) * _KILOBYTES[match[2]]) if match else None
