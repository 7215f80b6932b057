"""Groups of CPUs as each CPU's topology directory names them: packages, dies, clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentd.core.fold import Facts
from agentd.core.topology import Package
from agentd.hostfs import HostFs
from agentd.probes.cpus import BASE
from agentd.probes.lists import list_in, mask_in

_PACKAGE_FILES = ("package_cpus", "core_siblings")


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `packages`, `dies` and `clusters`.

    By the CPUs they name, never by id: an id may be -1, 8442, or the same for two sockets.
    """
    for cpu, cpus in _groups(host, facts, _PACKAGE_FILES):
        label = host.attribute(f"{BASE}/cpu{cpu}/topology/physical_package_id") or ""
        facts.packages.append(Package(cpus, label.strip()))
    facts.dies = [cpus for _, cpus in _groups(host, facts, ("die_cpus",))]
    facts.clusters = [cpus for _, cpus in _groups(host, facts, ("cluster_cpus",))]


def candidates(names: Sequence[str]) -> list[str]:
    """Return the files that may name the members: lists where there are any, else masks."""
    return [f"{name}{suffix}" for name in names for suffix in ("_list", "")]


def members_of(host: HostFs, facts: Facts, cpu: int, files: list[str]) -> tuple[int, ...]:
    """Return what the first of `files` that is there names; () if none is.

    That one moves to the front: the next CPU has it, too.
    """
    base = f"{BASE}/cpu{cpu}/topology"
    for place, name in enumerate(files):
        path = f"{base}/{name}"
        text = host.attribute(path)
        if text is not None:
            if place:
                files.insert(0, files.pop(place))
            read = list_in if name.endswith("_list") else mask_in
            return read(text, path, facts) or ()
    return ()


def ends(facts: Facts) -> tuple[int, ...]:
    """Return the first and the last online CPU: a file that both lack is none that others have."""
    online = facts.online or ()
    return (online[0], online[-1]) if online else ()


def _groups(
    host: HostFs, facts: Facts, names: Sequence[str]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each group's first online CPU and its online CPUs; asks one CPU of each group."""
    files = candidates(names)
    if not any(
        host.exists(f"{BASE}/cpu{cpu}/topology/{name}") for cpu in ends(facts) for name in files
    ):
        return
    online = set(facts.online or ())
    seen: set[int] = set()
    for cpu in facts.online or ():
        if cpu in seen:
            continue
        members = tuple(
            c for c in members_of(host, facts, cpu, files) if c in online and c not in seen
        )
        if cpu in members:
            seen.update(members)
            yield cpu, members
