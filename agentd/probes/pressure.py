"""Pressure stall information, and whether systemd runs the machine."""

from __future__ import annotations

from agentd.core.fold import Facts
from agentd.hostfs import HostFs

_RESOURCES = ("cpu", "memory", "io")


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `pressure` and `systemd`.

    With psi switched off at boot the files are there and each read fails (EOPNOTSUPP).
    """
    facts.pressure = tuple(
        name for name in _RESOURCES if "avg10=" in (host.attribute(f"proc/pressure/{name}") or "")
    )
    facts.systemd = host.exists("run/systemd/system")
