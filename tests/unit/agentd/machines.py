"""Small machines written by hand, as trees of kernel files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentd.core.topology import Overrides, Topology
from agentd.hostfs import HostFs
from agentd.probes import discover


def write_tree(root: Path, files: Mapping[str, str]) -> HostFs:
    """Write `files` (path to text) under `root`; return a reader of them."""
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return HostFs(root)


def two_sockets() -> dict[str, str]:
    """Two nodes of four cores with two threads each: CPU c and c + 8 are siblings."""
    files = {
        "sys/devices/system/cpu/possible": "0-15\n",
        "sys/devices/system/cpu/online": "0-15\n",
        "sys/devices/system/node/online": "0-1\n",
        "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
        "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
        "sys/devices/system/node/node0/distance": "10 21\n",
        "sys/devices/system/node/node1/distance": "21 10\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  1024 kB\n",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  2048 kB\n",
        "proc/meminfo": "MemTotal:        3072 kB\nMemAvailable:    1536 kB\n",
        "proc/cpuinfo": "processor\t: 0\nflags\t\t: lm fpu cx16 lahf_lm popcnt pni sse4_1 "
        "sse4_2 ssse3\nprocessor\t: 1\nflags\t\t: fpu lm cx16 lahf_lm popcnt pni sse4_1 "
        "sse4_2 ssse3 avx512f\n",
    }
    for cpu in range(16):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = (
            f"{cpu % 8},{cpu % 8 + 8}\n"
        )
    return files


def found(root: Path, files: Mapping[str, str], overrides: Overrides | None = None) -> Topology:
    """Return what discovery makes of `files`."""
    return discover(write_tree(root, files), overrides or Overrides())
