"""What a drawing of the machine says below the boxes: distances, kinds, abilities. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from agentd.core.topology import Control, Topology
from agentd.drawing_boxes import cpu_text, page_text, prose, shortened, wrapped

_MATRIX_NODES = 14
"""The largest distance table that is drawn cell by cell."""
_PATTERN_LINES = 8
_UNITS = {"percent": "%", "MBps": "MB/s", "eighth_GBps": "x 1/8 GB/s"}
# What llama.cpp has kernels for: its builds differ by these.
_NOTABLE = (
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8",
    "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme", "vsx", "lsx", "lasx",
)  # fmt: skip


def distance_lines(topology: Topology, width: int) -> list[str]:
    """Return the table of distances by node id; for many nodes, its patterns."""
    rows = {node.node: node.distances for node in topology.nodes.values()} or {
        domain.domain: domain.distances for domain in topology.domains.values()
    }
    rows = {node: row for node, row in sorted(rows.items()) if row}
    if len(rows) < 2:
        return []
    lines = _matrix(rows, width) if len(rows) <= _MATRIX_NODES else _patterns(rows, width)
    odd = [(a, b) for a in rows for b in rows if a < b and rows[a].get(b) != rows[b].get(a)]
    if odd:
        lines.append(f"not symmetric, e.g. between {odd[0][0]} and {odd[0][1]}")
    return lines


def _matrix(rows: Mapping[int, Mapping[int, int]], width: int) -> list[str]:
    columns = sorted({node for row in rows.values() for node in row})
    cells = [str(value) for row in rows.values() for value in row.values()]
    wide = max(map(len, [*cells, *map(str, columns)]))
    left = max(len("distance"), *(len(str(node)) for node in rows))
    lines = [
        f"{'distance':>{left}} │ " + " ".join(f"{node:>{wide}}" for node in columns),
        "─" * (left + 1) + "┼" + "─" * ((wide + 1) * len(columns) + 1),
    ]
    for node, row in rows.items():
        values = " ".join(f"{row.get(other, '-'):>{wide}}" for other in columns)
        lines.append(f"{node:>{left}} │ {values}")
    return [shortened(line, width) for line in lines]


def _patterns(rows: Mapping[int, Mapping[int, int]], width: int) -> list[str]:
    """How many nodes are how far, for each run of nodes that see the same."""

    def seen(node: int) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(Counter(rows[node].values()).items()))

    by_pattern: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for pattern, run in groupby(rows, key=seen):
        by_pattern.setdefault(pattern, []).extend(run)
    lines = [f"distances between {len(rows)} nodes (value x how many nodes):"]
    for pattern, nodes in list(by_pattern.items())[:_PATTERN_LINES]:
        head = f"  from {cpu_text(nodes, 30, 'nodes')}: "
        lines += wrapped(head, [f"{value} x {count}" for value, count in pattern], width, ", ")
    if len(by_pattern) > _PATTERN_LINES:
        lines.append(f"  and {len(by_pattern) - _PATTERN_LINES} more patterns")
    return lines


def fact_lines(topology: Topology, width: int) -> list[str]:
    """Return a line for each other ability: kinds, huge pages, resctrl, cgroups, ISA."""
    lines = []
    for kind in topology.kinds if len(topology.kinds) > 1 else ():
        text = f"CPUs {cpu_text(kind.cpus, 50)}"
        text += f", capacity {kind.capacity} of 1024" if kind.capacity is not None else ""
        text += f", MIDR {kind.midr}" if kind.midr else ""
        lines += prose(f"{kind.name}: ", text, width)
    for name, groups in (("dies", topology.dies), ("clusters", topology.clusters)):
        if 1 < len(groups) < len(topology.online):
            sizes = Counter(map(len, groups))
            text = ", ".join(f"{count} of {size} CPUs" for size, count in sorted(sizes.items()))
            lines += prose(f"{name}: ", text, width)
    lines += _huge_pages(topology, width)
    lines += prose("memory bandwidth (resctrl): ", _resctrl(topology), width)
    lines += prose("cgroups: ", _cgroups(topology), width)
    pressure = ", ".join(topology.pressure) or "not there"
    lines += prose("pressure stall information: ", pressure, width)
    lines.append(f"systemd: {'yes' if topology.systemd else 'no'}")
    levels = [name for name in topology.features if name.startswith("x86-64-v")]
    notable = [name for name in _NOTABLE if name in topology.features]
    if levels or notable:
        lines += wrapped("instruction set: ", [*levels[-1:], *notable], width)
    return lines


def _huge_pages(topology: Topology, width: int) -> list[str]:
    sizes = sorted({size for node in topology.nodes.values() for size in node.huge_pages})
    if not sizes:
        return []
    reserved = any(p.total for node in topology.nodes.values() for p in node.huge_pages.values())
    text = ", ".join(map(page_text, sizes)) + ("" if reserved else "; none reserved")
    return prose("huge pages: ", text, width)


def _resctrl(topology: Topology) -> str:
    if topology.resctrl is None:
        return "the kernel has none"
    parts = [_control(control) for _, control in sorted(topology.resctrl.controls.items())]
    if not topology.resctrl.mounted:
        parts.insert(0, "not mounted")
    if topology.resctrl.monitors:
        watched = ", ".join(topology.resctrl.monitors)
        parts.append(f"monitors {watched} ({topology.resctrl.rmids} RMIDs)")
    return "; ".join(parts) or "mounted, controls nothing"


def _control(control: Control) -> str:
    text = f"{control.resource}: {control.closids} groups"
    unit = _UNITS.get(control.unit, "")
    if control.min_bandwidth is not None:
        text += f", from {control.min_bandwidth} {unit}"
    if control.granularity is not None:
        text += f" in steps of {control.granularity}"
    return text.rstrip()


def _cgroups(topology: Topology) -> str:
    groups = topology.cgroups
    if not groups.version:
        return "none"
    text = f"v{groups.version}" + (" with v2 beside it" if groups.hybrid else "")
    text += ", writable" if groups.writable else ", not writable"
    return text + (f", controllers {' '.join(groups.controllers)}" if groups.controllers else "")
