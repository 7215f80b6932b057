"""Writes the kernel files of a large machine that does not exist, for the discovery benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentd.core.cpulist import format_list

_FLAGS = " ".join(f"flag{n}" for n in range(180)) + " lm fpu avx2 sse4_2"
_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_HUGE_PAGES_KB = (2048, 1048576)


@dataclass(slots=True, frozen=True)
class Shape:
    """CPUs are numbered along cores, cores along nodes, nodes along packages."""

    cpus: int
    nodes: int
    threads: int
    nodes_per_package: int


def write_machine(root: Path, shape: Shape) -> int:
    """Write every file that discovery reads on a recent x86 kernel; return how many."""
    files = {**_sets(shape), **_nodes(shape), **_proc(shape)}
    for cpu in range(shape.cpus):
        files |= _topology(shape, cpu)
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return len(files)


def _sets(shape: Shape) -> dict[str, str]:
    every = f"0-{shape.cpus - 1}"
    files = {f"{_CPU}/{name}": every for name in ("online", "present", "possible")}
    return {
        **files,
        f"{_CPU}/offline": "",
        f"{_CPU}/isolated": "",
        f"{_CPU}/nohz_full": "(null)",
        f"{_CPU}/kernel_max": "8191",
    }


def _block(cpu: int, size: int) -> str:
    first = cpu // size * size
    return format_list(range(first, first + size))


def _mask(numbers: range, width: int) -> str:
    digits = f"{sum(1 << number for number in numbers):0{width // 4}x}"
    return ",".join(digits[start : start + 8] for start in range(0, len(digits), 8))


def _topology(shape: Shape, cpu: int) -> dict[str, str]:
    of_node = shape.cpus // shape.nodes
    base, cache = f"{_CPU}/cpu{cpu}/topology", f"{_CPU}/cpu{cpu}/cache/index3"
    core, node = _block(cpu, shape.threads), _block(cpu, of_node)
    package = _block(cpu, of_node * shape.nodes_per_package)
    return {
        f"{_CPU}/cpu{cpu}/online": "1",
        f"{base}/core_cpus_list": core,
        f"{base}/thread_siblings_list": core,
        f"{base}/package_cpus_list": package,
        f"{base}/core_siblings_list": package,
        f"{base}/die_cpus_list": package,
        f"{base}/cluster_cpus_list": core,
        f"{base}/physical_package_id": str(cpu // (of_node * shape.nodes_per_package)),
        f"{cache}/level": "3",
        f"{cache}/shared_cpu_list": node,
        f"{cache}/size": "32768K",
        f"{cache}/id": str(cpu // of_node),
    }


def _nodes(shape: Shape) -> dict[str, str]:
    of_node = shape.cpus // shape.nodes
    files = {
        f"{_NODE}/{name}": f"0-{shape.nodes - 1}"
        for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory")
    }
    for node in range(shape.nodes):
        base = f"{_NODE}/node{node}"
        mine = range(node * of_node, (node + 1) * of_node)
        lines = [f"Node {node} Meaning{n}:  {n} kB" for n in range(30)]
        files |= {
            f"{base}/cpulist": format_list(mine),
            f"{base}/cpumap": _mask(mine, shape.cpus),
            f"{base}/distance": " ".join(
                "10" if other == node else "20" for other in range(shape.nodes)
            ),
            f"{base}/meminfo": "\n".join(
                [f"Node {node} MemTotal: 16777216 kB", f"Node {node} MemFree: 8388608 kB", *lines]
            ),
            f"{base}/numastat": "numa_hit 9\nnuma_miss 8\nnuma_foreign 7\ninterleave_hit 6\n"
            "local_node 5\nother_node 4",
            f"{base}/vmstat": "nr_free_pages 2097152",
        }
        for size in _HUGE_PAGES_KB:
            files[f"{base}/hugepages/hugepages-{size}kB/nr_hugepages"] = "16"
            files[f"{base}/hugepages/hugepages-{size}kB/free_hugepages"] = "4"
    return files


def _proc(shape: Shape) -> dict[str, str]:
    every = f"0-{shape.cpus - 1}"
    return {
        "proc/meminfo": f"MemTotal: {16777216 * shape.nodes} kB",
        "proc/cpuinfo": "\n".join(
            f"processor\t: {cpu}\nvendor_id\t: Nobody\nmodel name\t: Large\nflags\t\t: {_FLAGS}\n"
            for cpu in range(shape.cpus)
        ),
        "proc/self/status": f"Cpus_allowed_list:\t{every}\nMems_allowed_list:\t0-{shape.nodes - 1}",
        "proc/self/cgroup": "0::/job",
        "proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
        "sys/fs/cgroup/job/cpuset.cpus.effective": every,
        "sys/fs/cgroup/job/cpuset.mems.effective": f"0-{shape.nodes - 1}",
    }
