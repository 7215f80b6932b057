"""The model of a machine as JSON: ids are keys, sets of CPUs are lists such as `0-3,8`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from agentd.core.cpu_times import ALL_CPUS, sum_times
from agentd.core.cpulist import format_list
from agentd.core.topology import ControlGroups, NumaNode, Topology
from agentd.probes.readings import Readings

Json = dict[str, object]


def as_report(topology: Topology, readings: Readings | None = None) -> Json:
    """Return everything that discovery found, ready for json.dumps.

    With `readings`, also what holds for this moment: pressure, control groups, resctrl's
    groups, CPU times. What the machine does not say is left out.
    """
    report: Json = {
        "arch": topology.arch,
        "cpus": _cpus(topology),
        "has_node_dir": topology.numa,
        "node_files": dict(topology.node_files),
        "nodes": [_node(node) for node in topology.nodes.values()],
        "packages": [
            {"cpus": format_list(package.cpus), "physical_package_id": package.label}
            for package in topology.packages
        ],
        "dies": _lists(topology.dies),
        "clusters": _lists(topology.clusters),
        "cores": _lists(topology.all_cores),
        "core_count": len(topology.all_cores),
        "threads_per_core": _threads(topology),
        "l3": [
            {
                "cpus": format_list(cache.cpus),
                "size_kb": cache.size_kb,
                "id": None if cache.cache is None else str(cache.cache),
            }
            for cache in topology.caches
        ],
        "cpu_capacity": _by_value(topology.capacities),
        "midr_el1": _by_value(topology.midrs),
        "kinds": [
            {
                "name": kind.name,
                "cpus": format_list(kind.cpus),
                "capacity": kind.capacity,
                "midr": kind.midr,
            }
            for kind in topology.kinds
        ],
        "cpuinfo": {name: list(values) for name, values in topology.cpu_names.items()},
        "cpuinfo_processors": topology.cpuinfo_processors,
        "cpus_without_topology_dir": format_list(topology.sets.without_topology),
        "online_cpus_in_no_node": _strays(topology),
        "cgroup": _cgroup(topology),
        "psi": list(topology.pressure),
        "resctrl_abilities": _abilities(topology),
        "systemd": topology.systemd,
        "page_bytes": topology.page_bytes,
        "domains": _domains(topology),
        "features": list(topology.features),
        "warnings": list(topology.warnings),
    }
    if readings is not None:
        report |= _moment(topology, readings)
    return report


def _cpus(topology: Topology) -> Json:
    sets = topology.sets
    directories = set(sets.directories)
    return {
        "files": dict(sets.files),
        "online": format_list(topology.online),
        "online_source": sets.online_from,
        "online_with_cpu_dir": format_list(set(topology.online) & directories),
        "present_not_online": format_list(sets.offline),
        "count_online": len(topology.online),
        "cpu_dirs": format_list(directories),
        "isolated": format_list(sets.isolated),
        "nohz_full": format_list(sets.nohz_full),
    }


def _node(node: NumaNode) -> Json:
    report: Json = {
        "id": node.node,
        "cpulist": format_list(node.listed_cpus),
        "cpulist_source": node.listed_by,
        "online_cpus": format_list(node.cpus),
        "mem_total_kb": _kilobytes(node.memory_bytes),
        "mem_free_kb": _kilobytes(node.free_bytes),
        "kind": node.kind,
    }
    if node.mapped_cpus is not None:
        report["cpulist_vs_cpumap"] = f"disagree: map={format_list(node.mapped_cpus)}"
    if node.distance_row:
        report["distance_raw"] = list(node.distance_row)
        report["distance"] = {str(n): d for n, d in node.distances.items()} or None
    if node.huge_pages:
        report["hugepages"] = {
            f"{size}kB": {"nr": pages.total, "free": pages.free}
            for size, pages in node.huge_pages.items()
        }
    if node.statistics:
        report["numastat"] = dict(node.statistics)
    return report


def _cgroup(topology: Topology) -> Json:
    groups = topology.cgroups
    report: Json = {
        "version": groups.version,
        "hybrid": groups.hybrid,
        "writable": groups.writable,
        "controllers": list(groups.controllers),
        "self": groups.own,
        **groups.limits,
    }
    if groups.kind:
        report["type"] = _hierarchy(groups)
    if topology.sets.allowed is not None:
        allowed = set(topology.sets.allowed) & set(topology.online)
        report["allowed_online_cpus"] = format_list(allowed)
    return report


def _hierarchy(groups: ControlGroups) -> str:
    at = "/" + groups.mount
    return f"cgroup2 on {at}" if groups.kind == "v2" else f"cpuset v1 mounted on {at}"


def _abilities(topology: Topology) -> Json | None:
    resctrl = topology.resctrl
    if resctrl is None:
        return None
    return {
        "mounted": resctrl.mounted,
        "controls": {
            name: {
                "closids": control.closids,
                "min_bandwidth": control.min_bandwidth,
                "granularity": control.granularity,
                "unit": control.unit,
            }
            for name, control in resctrl.controls.items()
        },
        "monitors": list(resctrl.monitors),
        "rmids": resctrl.rmids,
    }


def _domains(topology: Topology) -> Json:
    return {
        str(domain.domain): {
            "cpus": format_list(domain.cpus),
            "cores": _lists(topology.cores(domain.cpus)),
            "memory_bytes": domain.memory_bytes,
            "distances": {str(node): value for node, value in domain.distances.items()},
        }
        for domain in topology.domains.values()
    }


def _moment(topology: Topology, readings: Readings) -> Json:
    report: Json = {
        "pressure": {name: list(lines) for name, lines in readings.pressure.items()},
        "cgroups": dict(readings.cgroups),
    }
    if readings.resctrl:
        report["resctrl"] = dict(readings.resctrl)
    if readings.cpu_times:
        report["proc_stat_cpus"] = format_list(c for c in readings.cpu_times if c != ALL_CPUS)
        report["cpu_ms"] = {
            "all": dict(readings.cpu_times.get(ALL_CPUS, {})),
            "nodes": {
                str(node.node): sum_times(readings.cpu_times, node.cpus)
                for node in topology.nodes.values()
            },
        }
    return report


def _strays(topology: Topology) -> str:
    if not topology.nodes:
        return ""
    inside = {cpu for node in topology.nodes.values() for cpu in node.cpus}
    return format_list(set(topology.online) - inside)


def _threads(topology: Topology) -> dict[str, int]:
    counts = Counter(len(core) for core in topology.all_cores)
    return {str(threads): cores for threads, cores in sorted(counts.items())}


def _lists(groups: Iterable[tuple[int, ...]]) -> list[str]:
    return [format_list(cpus) for cpus in groups]


def _by_value(values: Mapping[int, object]) -> Json:
    groups: dict[str, list[int]] = {}
    for cpu, value in values.items():
        groups.setdefault(str(value), []).append(cpu)
    return {value: format_list(cpus) for value, cpus in groups.items()}


def _kilobytes(size: int | None) -> int | None:
    return None if size is None else size // 1024
