"""Which files a capture may hold: a closed list, by directory.

In a path `*` stands for any part of one name and `#` for digits. What is not listed here
is never read. A name that ends in `/` is a directory of which only the name is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_PMU = "sys/bus/event_source/devices"
_MEMORY = "sys/kernel/mm"
_RESCTRL = "sys/fs/resctrl"
_EDAC = "sys/devices/system/edac/mc"


# Not here on purpose: topology/ppin is a serial number.
_TOPOLOGY = (
    "physical_package_id die_id cluster_id core_id core_type book_id drawer_id core_siblings "
    "core_siblings_list thread_siblings thread_siblings_list core_cpus core_cpus_list package_cpus "
    "package_cpus_list die_cpus die_cpus_list cluster_cpus cluster_cpus_list book_siblings "
    "book_siblings_list drawer_siblings drawer_siblings_list"
)
_CACHE = (
    "id level type size shared_cpu_map shared_cpu_list coherency_line_size number_of_sets "
    "ways_of_associativity physical_line_partition"
)
_RESCTRL_GROUP = "schemata mode size cpus cpus_list"

ALLOWED: Mapping[str, str] = {
    "proc": "cpuinfo meminfo stat version cmdline mounts filesystems",
    "proc/self": "status cgroup cpuset mounts smaps",
    "proc/pressure": "cpu memory io irq",
    "proc/sys/kernel": "arch numa_balancing",
    "run/systemd": "system/",
    _CPU: "possible present online offline isolated nohz_full kernel_max cpu#/",
    f"{_CPU}/smt": "active control",
    f"{_CPU}/cpu#": "online cpu_capacity address polarization dedicated node#/",
    f"{_CPU}/cpu#/acpi_cppc": "highest_perf nominal_perf lowest_perf",
    f"{_CPU}/cpu#/cpufreq": "cpuinfo_min_freq cpuinfo_max_freq base_frequency",
    f"{_CPU}/cpu#/regs/identification": "midr_el1 revidr_el1 aidr_el1",
    f"{_CPU}/cpu#/topology": _TOPOLOGY,
    f"{_CPU}/cpu#/cache/index#": _CACHE,
    f"{_CPU}/cpu#/thermal_throttle": " ".join(
        f"{what}_{name}"
        for what in ("core", "package")
        for name in ("throttle_count", "throttle_max_time_ms", "throttle_total_time_ms")
    ),
    "sys/devices/cpu_core": "cpus",
    "sys/devices/cpu_atom": "cpus",
    "sys/devices/cpu_lowpower": "cpus",
    _NODE: (
        "possible online has_cpu has_memory has_normal_memory has_high_memory "
        "has_generic_initiator node#/"
    ),
    f"{_NODE}/node#": "cpulist cpumap distance meminfo numastat vmstat cpu#/",
    f"{_NODE}/node#/hugepages/hugepages-#kB": "nr_hugepages free_hugepages surplus_hugepages",
    f"{_NODE}/node#/access#/initiators": (
        "read_bandwidth read_latency write_bandwidth write_latency node#/"
    ),
    f"{_MEMORY}/hugepages/hugepages-#kB": (
        "nr_hugepages free_hugepages resv_hugepages surplus_hugepages nr_overcommit_hugepages"
    ),
    f"{_MEMORY}/transparent_hugepage": "enabled shmem_enabled hpage_pmd_size",
    f"{_PMU}/*": "type cpumask cpus identifier",
    f"{_PMU}/*/format": "*",
    f"{_PMU}/*/events": "*",
    _RESCTRL: _RESCTRL_GROUP,
    f"{_RESCTRL}/info": "*",
    f"{_RESCTRL}/info/*": "*",
    f"{_RESCTRL}/info/*/event_configs/*": "event_filter",
    f"{_RESCTRL}/mon_data/*": "*",
    f"{_RESCTRL}/mon_groups": "*/",
    f"{_RESCTRL}/*": _RESCTRL_GROUP,
    _EDAC: "mc#/",
    f"{_EDAC}/mc#": "mc_name size_mb ce_count ue_count ce_noinfo_count ue_noinfo_count",
    f"{_EDAC}/mc#/csrow#": "ce_count ue_count size_mb mem_type",
    f"{_EDAC}/mc#/dimm#": "dimm_ce_count dimm_ue_count size dimm_mem_type",
    f"{_EDAC}/mc#/rank#": "dimm_ce_count dimm_ue_count size dimm_mem_type",
}

CGROUP_FILES = (
    "cgroup.controllers", "cgroup.subtree_control", "cgroup.type", "cpuset.cpus", "cpuset.mems",
    "cpuset.cpus.effective", "cpuset.mems.effective", "cpuset.effective_cpus",
    "cpuset.effective_mems", "cpuset.cpus.partition", "cpus", "mems", "cpu.max", "cpu.weight",
    "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.max", "memory.high",
    "memory.limit_in_bytes", "cpu.pressure", "memory.pressure", "io.pressure",
)  # fmt: skip
"""Read of each control group on our own way up, and of `corefleet.slice`."""

CGROUP_MOUNTS = (
    "sys/fs/cgroup", "sys/fs/cgroup/unified", "sys/fs/cgroup/cpuset",
    "sys/fs/cgroup/cpuset,cpu,cpuacct", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpu,cpuset",
    "sys/fs/cgroup/cpu", "sys/fs/cgroup/memory", "dev/cpuset", "cgroup/unified", "cgroup/cpuset",
)  # fmt: skip
"""Where control groups are mounted; others are not looked at."""


@dataclass(slots=True, frozen=True)
class Listed:
    """A directory of the list."""

    files: re.Pattern[str]
    """Names of the files that are read."""
    directories: re.Pattern[str]
    """Names of directories of which only the name is kept."""
    below: tuple[tuple[re.Pattern[str], Listed], ...]


@cache
def listing() -> Listed:
    """Return the list as a tree."""
    return _listed("")


def _listed(directory: str) -> Listed:
    names = ALLOWED.get(directory, "").split()
    start = f"{directory}/" if directory else ""
    parts = {path[len(start) :].split("/")[0] for path in ALLOWED if path.startswith(start)}
    return Listed(
        files=_pattern(name for name in names if not name.endswith("/")),
        directories=_pattern(name[:-1] for name in names if name.endswith("/")),
        below=tuple((_pattern([part]), _listed(start + part)) for part in sorted(parts - {""})),
    )


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    wild = {"*": r"[^/]*", "#": r"\d+"}
    one_of = ("".join(wild.get(c) or re.escape(c) for c in text) for text in texts)
    return re.compile(f"(?:{'|'.join(one_of) or '(?!)'})\\Z")
