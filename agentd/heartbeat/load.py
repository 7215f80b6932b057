"""CPU and memory load of the node, from the kernel's counters."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentd.hostfs import HostFs

_MEMORY = re.compile(r"^(MemTotal|MemAvailable):\s+(\d+) kB", re.MULTILINE)


class LoadSampler:
    """Measures between one `sample` and the next."""

    def __init__(self, host: HostFs, cpus: Sequence[int]) -> None:
        self._host = host
        self._names = frozenset(f"cpu{cpu}" for cpu in cpus)
        self._before = self._jiffies()

    def sample(self) -> tuple[float, float]:
        """Return the shares of CPU time and of memory in use, each 0 to 1."""
        now = self._jiffies()
        busy, total = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        cpu = min(1.0, max(0.0, busy / total)) if total > 0 else 0.0
        return cpu, self._memory()

    def _jiffies(self) -> tuple[int, int]:
        """Return (busy, all) of our CPUs since boot. Steal counts as busy: it is not ours."""
        busy = total = 0
        for line in (self._host.read("proc/stat") or "").splitlines():
            name, *fields = line.split()
            if name not in self._names:
                continue
            values = [int(field) for field in fields[:8] if field.isdecimal()]
            idle = sum(values[3:5])
            total += sum(values)
            busy += sum(values) - idle
        return busy, total

    def _memory(self) -> float:
        sizes = dict(_MEMORY.findall(self._host.read("proc/meminfo") or ""))
        total, free = int(sizes.get("MemTotal", 0)), int(sizes.get("MemAvailable", 0))
        return min(1.0, max(0.0, 1.0 - free / total)) if total else 0.0
