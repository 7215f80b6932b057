"""Memory of the machine and of each node: bytes, huge pages of every size, statistics."""

from __future__ import annotations

import re

from agentd.core.fold import Facts
from agentd.core.topology import HugePages
from agentd.hostfs import HostFs
from agentd.probes.nodes import BASE

_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")
_FREE = re.compile(r"MemFree:\s+(\d+) kB")
_SIZE = re.compile(r"hugepages-(\d+)kB\Z")
_FREE_PAGES = re.compile(r"^nr_free_pages (\d+)$", re.MULTILINE)
_KERNEL_PAGE = re.compile(r"^KernelPageSize:\s+(\d+) kB$", re.MULTILINE)
_PAGE_SIZES = (4096, 8192, 16384, 65536)


def probe(host: HostFs, facts: Facts) -> None:
    """Fill memory, huge pages and statistics, and the page size."""
    probe_nodes(host, facts)
    facts.page_bytes = host.page_bytes or _recorded_page(host, facts) or facts.page_bytes


def probe_nodes(host: HostFs, facts: Facts, sizes: tuple[int, ...] | None = None) -> None:
    """Fill all but the page size; `sizes` (kB) are the huge pages already known to be there."""
    facts.total_memory = _kilobytes(_TOTAL, host.read("proc/meminfo")) or 0
    for node in facts.node_cpus:
        base = f"{BASE}/node{node}"
        text = host.attribute(f"{base}/meminfo")
        size, free = _kilobytes(_TOTAL, text), _kilobytes(_FREE, text)
        if size is not None:
            facts.node_memory[node] = size
        if free is not None:
            facts.node_free[node] = free
        pages = _huge_pages(host, f"{base}/hugepages", sizes)
        if pages:
            facts.node_huge_pages[node] = pages
        statistics = _statistics(host.attribute(f"{base}/numastat"))
        if statistics:
            facts.node_statistics[node] = statistics


def _kilobytes(pattern: re.Pattern[str], text: str | None) -> int | None:
    match = pattern.search(text or "")
    return int(match[1]) * 1024 if match else None


def _huge_pages(host: HostFs, base: str, sizes: tuple[int, ...] | None) -> dict[int, HugePages]:
    if sizes is None:
        sizes = tuple(sorted(int(m[1]) for name in host.names(base) if (m := _SIZE.match(name))))
    found = {}
    for size in sizes:
        total = _number(host.attribute(f"{base}/hugepages-{size}kB/nr_hugepages"))
        if total is not None:
            free = _number(host.attribute(f"{base}/hugepages-{size}kB/free_hugepages"))
            found[size] = HugePages(total, free or 0)
    return found


def _statistics(text: str | None) -> dict[str, int]:
    pairs = (line.split() for line in (text or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isdecimal() else None


def _recorded_page(host: HostFs, facts: Facts) -> int | None:
    """A recording tells by its own smaps, or by free memory in kB beside free pages."""
    match = _KERNEL_PAGE.search(host.read("proc/self/smaps") or "")
    if match:
        return int(match[1]) * 1024
    for node, free in facts.node_free.items():
        pages = _FREE_PAGES.search(host.attribute(f"{BASE}/node{node}/vmstat") or "")
        if pages and int(pages[1]):
            per_page = free / int(pages[1])
            # The two files were read at different moments.
            return min(_PAGE_SIZES, key=lambda size: abs(size - per_page))
    return None
