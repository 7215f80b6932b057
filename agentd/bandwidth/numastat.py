"""Which share of a node's new pages was for processes that ran on another node."""

from __future__ import annotations

from collections.abc import Iterable

from agentd.hostfs import HostFs


class RemoteShare:
    """Measures between one `sample` and the next.

    The kernel's Documentation/admin-guide/numastat.rst: `local_node` counts pages given on
    this node to processes that ran on it, `other_node` those given to processes that ran
    elsewhere. The share is other / (local + other).
    """

    def __init__(self, host: HostFs, domains: Iterable[int]) -> None:
        self._host = host
        self._before = {domain: self._pages(domain) for domain in domains}

    def sample(self) -> dict[int, float]:
        """Return each domain's share; one without files or new pages is absent."""
        shares = {}
        for domain, before in self._before.items():
            now = self._pages(domain)
            self._before[domain] = now
            if now is None or before is None:
                continue
            local, other = now[0] - before[0], now[1] - before[1]
            if local >= 0 and other >= 0 and local + other > 0:
                shares[domain] = other / (local + other)
        return shares

    def _pages(self, domain: int) -> tuple[int, int] | None:
        text = self._host.read(f"sys/devices/system/node/node{domain}/numastat") or ""
        counts = {}
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if value.strip().isdecimal():
                counts[name] = int(value)
        if "local_node" not in counts or "other_node" not in counts:
            return None
        return counts["local_node"], counts["other_node"]
