"""Pressure stall information, and the time that the hypervisor took."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from agentd.bandwidth.report import Source
from agentd.bandwidth.sensor import Load
from agentd.hostfs import HostFs

_SOME = re.compile(r"^some avg10=(\d+(?:\.\d+)?)", re.MULTILINE)
_STEAL_FIELD = 7
_FIELDS = 8
"""user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user (proc(5))."""


def pressure_of(host: HostFs, resource: Literal["cpu", "memory"]) -> float | None:
    """Return PSI's `some avg10` as a share, None where the kernel gives none.

    Format: the kernel's Documentation/accounting/psi.rst; the average is in percent.
    """
    match = _SOME.search(host.read(f"proc/pressure/{resource}") or "")
    return float(match[1]) / 100 if match else None


class Steal:
    """Share of the machine's CPU time that the hypervisor took between two samples."""

    def __init__(self, host: HostFs) -> None:
        self._host = host
        self._before = self._jiffies()

    def sample(self) -> float:
        """Return the share, 0 to 1; 0.0 where the kernel does not say."""
        now = self._jiffies()
        steal, total = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        return min(1.0, max(0.0, steal / total)) if total > 0 else 0.0

    def _jiffies(self) -> tuple[int, int]:
        first = (self._host.read("proc/stat") or "").partition("\n")[0].split()
        values = [int(field) for field in first[1 : 1 + _FIELDS] if field.isdecimal()]
        if first[:1] != ["cpu"] or len(values) < _FIELDS:
            return 0, 0
        return values[_STEAL_FIELD], sum(values)


class PressureSensor:
    """The last resort: always usable, and senses no bandwidth."""

    @property
    def source(self) -> Source:
        return "pressure"

    def available(self) -> str | None:
        return None

    def sample(self, now: float) -> Mapping[int, Load]:
        return {}

    def close(self) -> None:
        return
