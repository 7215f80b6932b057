"""The machine as a drawing for people: packages, domains, L3 groups, cores and threads. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentd.core.cpulist import format_list
from agentd.core.topology import Topology
from agentd.drawing_boxes import (
    Block,
    box,
    cpu_text,
    folded,
    in_ascii,
    page_text,
    prose,
    shortened,
    size_text,
    wrapped,
)
from agentd.drawing_facts import distance_lines, fact_lines

WIDTH_COLUMNS = 100

_MOST_CORES_OF_ROW = 24
_CORES_OF_LONG_ROW = 4
_CPU_LIST_COLUMNS = 30


@dataclass(slots=True, frozen=True)
class _Place:
    """A NUMA node, or the whole machine where the kernel has none."""

    node: int
    cpus: tuple[int, ...]
    listed: tuple[int, ...]
    memory_bytes: int | None


def as_text(topology: Topology, ascii: bool = False) -> str:
    """Return a drawing at most 100 columns wide, without colours.

    It grows with the number of different parts, not of parts: equal ones are folded.
    `ascii` draws with ASCII alone, for the C locale.
    """
    places = _places(topology)
    lines = prose("", _headline(topology), WIDTH_COLUMNS)
    if not topology.numa:
        lines.append("no NUMA nodes: the whole machine is domain 0")
    lines += _drawn(topology, places)
    lines += _legend(topology)
    lines += distance_lines(topology, WIDTH_COLUMNS)
    lines += fact_lines(topology, WIDTH_COLUMNS)
    for warning in topology.warnings:
        lines += prose("warning: ", warning, WIDTH_COLUMNS)
    text = "\n".join(line.rstrip() for line in lines)
    return in_ascii(text) if ascii else text


def _headline(topology: Topology) -> str:
    arch = topology.arch or "unknown architecture"
    many = "s" if len(topology.online) != 1 else ""
    online = cpu_text(topology.online, 40)
    parts = [f"{arch}, {len(topology.online)} CPU{many} online ({online})"]
    for count, noun in (
        (len(topology.packages), "package"),
        (len(topology.nodes), "NUMA node"),
        (len(topology.domains), "domain"),
    ):
        if count:
            parts.append(f"{count} {noun}{'s' if count > 1 else ''}")
    parts.append(f"pages of {page_text(topology.page_bytes // 1024)}")
    return ", ".join(parts)


def _places(topology: Topology) -> list[_Place]:
    places = [
        _Place(node.node, node.cpus, node.listed_cpus, node.memory_bytes)
        for _, node in sorted(topology.nodes.items())
    ]
    if not places:
        places = [
            _Place(domain.domain, domain.cpus, domain.cpus, domain.memory_bytes)
            for _, domain in sorted(topology.domains.items())
        ]
    return places


def _drawn(topology: Topology, places: list[_Place]) -> list[str]:
    """Nodes inside packages where each node has one; else nodes with packages as rows."""
    with_cpus = [place for place in places if place.cpus]
    without = [place for place in places if not place.cpus]
    owner = _package_of(topology, with_cpus)
    if owner is None:
        lines = folded(
            [_node_block(topology, place, WIDTH_COLUMNS, split=True) for place in with_cpus],
            WIDTH_COLUMNS,
        )
    else:
        blocks = []
        for index, package in enumerate(topology.packages):
            inside = [
                _node_block(topology, place, WIDTH_COLUMNS - 4, split=False)
                for place in with_cpus
                if owner[place.node] == index
            ]
            title = f"{_package_name(topology, index)}: CPUs {cpu_text(package.cpus, 60)}"
            blocks.append(
                Block(
                    noun="packages",
                    names=(package.label,),
                    cpus=package.cpus,
                    lines=box(title, folded(inside, WIDTH_COLUMNS - 4), WIDTH_COLUMNS),
                    shape=tuple(block.shape for block in inside),
                    bytes_each=tuple(
                        sum(size) for size in [[n for b in inside for n in b.bytes_each]] if size
                    ),
                )
            )
        lines = folded(blocks, WIDTH_COLUMNS)
    return lines + folded([_bare_block(place) for place in without], WIDTH_COLUMNS)


def _package_of(topology: Topology, places: list[_Place]) -> dict[int, int] | None:
    """Return each node's package, by index; None if a node is not inside just one."""
    package_of = {
        cpu: index for index, package in enumerate(topology.packages) for cpu in package.cpus
    }
    owner = {}
    for place in places:
        found = {package_of.get(cpu) for cpu in place.cpus}
        index = found.pop()
        if found or index is None:
            return None
        owner[place.node] = index
    return owner or None


def _package_name(topology: Topology, index: int) -> str:
    """The kernel's label where it tells packages apart, else the index and the label."""
    label = topology.packages[index].label
    unique = sum(package.label == label for package in topology.packages) == 1
    if unique and label.isdecimal() and len(label) <= 6:
        return f"package {label}"
    return f"package #{index}" + (f" (labelled {shortened(label, 20)})" if label else "")


def _node_block(topology: Topology, place: _Place, width: int, *, split: bool) -> Block:
    cores = _cores_of(topology, place.cpus)
    used = topology.domains.get(place.node)
    title = (
        f"{'domain' if used else 'node'} {place.node}: "
        f"CPUs {cpu_text(place.cpus, _CPU_LIST_COLUMNS)}, {_core_text(cores)}"
    )
    title += f", {size_text(place.memory_bytes)}" if place.memory_bytes else ", no memory"
    notes = []
    if used is None:
        notes.append("not used: none of its CPUs, or not its memory, is ours")
    elif used.cpus != place.cpus:
        notes.append(f"used: CPUs {cpu_text(used.cpus, width - 24)}")
    away = sorted(set(place.listed) - set(place.cpus))
    if away:
        notes.append(f"offline: CPUs {cpu_text(away, width - 24)}")
    node = topology.nodes.get(place.node)
    pages = [
        f"{size.total} of {page_text(kilobytes)} ({size.free} free)"
        for kilobytes, size in sorted(node.huge_pages.items())
        if size.total
    ] if node else []  # fmt: skip
    if pages:
        notes += wrapped("huge pages: ", pages, width - 4, ", ")
    rows = [_row_block(topology, place, row, width - 4) for row in _rows(topology, cores, split)]
    return Block(
        noun="domains" if used else "nodes",
        names=(str(place.node),),
        cpus=place.cpus,
        lines=box(title, [*notes, *folded(rows, width - 4)], width),
        shape=(
            used is None,
            used is not None and used.cpus == place.cpus,
            len(away),
            bool(place.memory_bytes),
            len(pages),
            tuple(row.shape for row in rows),
        ),
        bytes_each=(place.memory_bytes,) if place.memory_bytes else (),
    )


def _bare_block(place: _Place) -> Block:
    """A node without online CPUs: one line."""
    what = f"memory only, {size_text(place.memory_bytes)}" if place.memory_bytes else "empty"
    away = f", offline: CPUs {cpu_text(place.listed, 40)}" if place.listed else ""
    return Block(
        noun="nodes",
        names=(str(place.node),),
        cpus=(),
        lines=(f"  node {place.node}: {what}{away}",),
        shape=(bool(place.memory_bytes), len(place.listed)),
        bytes_each=(place.memory_bytes,) if place.memory_bytes else (),
    )


def _cores_of(topology: Topology, cpus: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Physical cores cut to `cpus`; those that we may not use are among them."""
    wanted = set(cpus)
    cores = [tuple(c for c in core if c in wanted) for core in topology.all_cores]
    known = {cpu for core in cores for cpu in core}
    strays = tuple(cpu for cpu in cpus if cpu not in known)
    return tuple(sorted([*(core for core in cores if core), *topology.cores(strays)]))


def _core_text(cores: Sequence[tuple[int, ...]]) -> str:
    counts = sorted(Counter(map(len, cores)).items(), reverse=True)
    noun = "core" if len(cores) == 1 else "cores"
    if len(counts) == 1:
        each = " each" if len(cores) > 1 else ""
        return f"{len(cores)} {noun} of {_threads(counts[0][0])}{each}"
    return f"{len(cores)} {noun}: " + ", ".join(f"{n} of {_threads(t)}" for t, n in counts)


def _threads(count: int) -> str:
    return f"{count} threads" if count > 1 else "one thread"


@dataclass(slots=True, frozen=True)
class _Row:
    """Cores of one node that share an L3, a kind and, if asked for, a package."""

    label: str
    cores: tuple[tuple[int, ...], ...]
    elsewhere: int
    """CPUs of other nodes that share the L3."""


def _rows(topology: Topology, cores: Sequence[tuple[int, ...]], split: bool) -> list[_Row]:
    package_of = {cpu: i for i, package in enumerate(topology.packages) for cpu in package.cpus}
    cache_of = {cpu: i for i, cache in enumerate(topology.caches) for cpu in cache.cpus}
    kind_of = {cpu: i for i, kind in enumerate(topology.kinds) for cpu in kind.cpus}
    by_package = split and len(topology.packages) > 1
    by_kind = len(topology.kinds) > 1
    grouped: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
    for core in cores:
        first = core[0]
        key = (
            package_of.get(first, -1) if by_package else -1,
            cache_of.get(first, -1),
            kind_of.get(first, -1) if by_kind else -1,
        )
        grouped.setdefault(key, []).append(core)
    here = {cpu for core in cores for cpu in core}
    rows = []
    for (package, cache, kind), members in grouped.items():
        label = [_package_name(topology, package)] if package >= 0 else []
        elsewhere = 0
        if cache >= 0:
            size = topology.caches[cache].size_kb
            label.append("L3" + (f" {size_text(size * 1024)}" if size else ""))
            elsewhere = len(set(topology.caches[cache].cpus) - here)
        if kind >= 0:
            label.append(topology.kinds[kind].name)
        rows.append(_Row(", ".join(label) or "cores", tuple(members), elsewhere))
    return rows


def _row_block(topology: Topology, place: _Place, row: _Row, width: int) -> Block:
    shown: Sequence[tuple[int, ...]] = row.cores
    cells = [_cell(topology, place, core) for core in shown]
    if len(cells) > _MOST_CORES_OF_ROW:
        last = f"{cells[-1]} ({len(cells)} cores)"
        cells = [*cells[:_CORES_OF_LONG_ROW], "..", last]
    if row.elsewhere:
        cells.append(f"and {row.elsewhere} CPUs of other nodes")
    cpus = tuple(sorted(cpu for core in row.cores for cpu in core))
    marked = tuple(len(_marks(topology, place, cpu)) for core in row.cores for cpu in core)
    return Block(
        noun="rows",
        names=("",),
        cpus=cpus,
        lines=tuple(wrapped(f"{row.label:<14} ", cells, width)),
        shape=(
            row.label.partition(",")[2] if row.label.startswith("package") else row.label,
            tuple(sorted(Counter(map(len, row.cores)).items())),
            row.elsewhere,
            sum(marked),
        ),
    )


def _cell(topology: Topology, place: _Place, core: tuple[int, ...]) -> str:
    threads = []
    for cpu in core:
        marks = _marks(topology, place, cpu)
        name = f"({cpu})" if "(" in marks else str(cpu)
        threads.append(name + marks.replace("(", ""))
    return f"[{' '.join(threads)}]"


def _marks(topology: Topology, place: _Place, cpu: int) -> str:
    """`*` isolated, `~` without a tick, `(` not ours."""
    domain = topology.domains.get(place.node)
    marks = "*" if cpu in topology.sets.isolated else ""
    marks += "~" if cpu in topology.sets.nohz_full else ""
    return marks if domain is not None and cpu in domain.cpus else marks + "("


def _legend(topology: Topology) -> list[str]:
    usable = {cpu for domain in topology.domains.values() for cpu in domain.cpus}
    lines = []
    if topology.sets.isolated:
        lines.append(f"N*  isolated from the scheduler: {format_list(topology.sets.isolated)}")
    if topology.sets.nohz_full:
        lines.append(f"N~  without a tick (nohz_full): {format_list(topology.sets.nohz_full)}")
    unused = sorted(set(topology.online) - usable)
    if unused:
        lines.append(f"(N) not used: {cpu_text(unused, 60)}")
    if topology.sets.offline:
        lines.append(f"offline: {cpu_text(topology.sets.offline, 60)}")
    return [shortened(line, WIDTH_COLUMNS) for line in lines]
