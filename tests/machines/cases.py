"""Recorded machines: folders of `<id>.tar.gz` with `<id>.expected.json` beside each.

`captures` holds what `agentd capture` wrote of machines at hand. COREFLEET_MACHINES names
another folder; else that is `shared/machines` beside the checkout.
"""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from agentd.core.topology import Overrides, Topology
from agentd.discovery_json import Json, as_report
from agentd.hostfs import HostFs
from agentd.probes import discover
from agentd.probes.readings import read_readings

CAPTURES = Path(__file__).parent / "captures"
FOLDER = Path(
    os.environ.get("COREFLEET_MACHINES")
    or Path(__file__).resolve().parents[3] / "shared" / "machines"
)

INFORMATIONAL = {
    "id": "the case's own name",
    "status": "says whether upstream edited the recording",
    "machine": "the finder's description",
    "source": "where the recording comes from",
    "oracle": "which other program agrees with the values",
    "notes": "prose about the oddity",
    "self_from": "which file the finder took the group from",
}
"""Keys of expected.json that are text about the case, and nothing a machine says."""

EXACT = frozenset(
    {
        "cpu_capacity", "distance", "groups", "hugepages", "midr_el1", "node_files", "numastat",
        "schemata_parsed", "threads_per_core", "variants",
    }
)  # fmt: skip
"""Objects that must have no key too many; of the others the report may say more."""


@dataclass(slots=True)
class Comparison:
    """`compared` counts the single values that were held against each other."""

    differences: list[str] = field(default_factory=list)
    compared: int = 0


def case_ids() -> list[str]:
    """Return the cases of the folder, none if it is not there."""
    return sorted(path.name.removesuffix(".tar.gz") for path in FOLDER.glob("*.tar.gz"))


def capture_ids() -> list[str]:
    """Return the cases that the project recorded itself."""
    return sorted(path.name.removesuffix(".tar.gz") for path in CAPTURES.glob("*.tar.gz"))


def _folder(case: str) -> Path:
    return CAPTURES if (CAPTURES / f"{case}.tar.gz").exists() else FOLDER


def expected_of(case: str) -> Json:
    loaded: Json = json.loads((_folder(case) / f"{case}.expected.json").read_text(encoding="utf-8"))
    return loaded


def unpack(case: str, into: Path) -> Path:
    """Unpack a case; return its root."""
    with tarfile.open(_folder(case) / f"{case}.tar.gz") as archive:
        archive.extractall(into, filter="tar")
    return into / case


def examine(root: Path) -> tuple[Topology, Json]:
    """Return what discovery makes of the machine under `root`, as model and as report."""
    host = HostFs(root)
    topology = discover(host, Overrides())
    # Through JSON, as `agentd discover --json` prints it.
    report: Json = json.loads(json.dumps(as_report(topology, read_readings(host))))
    return topology, report


def report_of(root: Path, expected: Json) -> Json:
    """Return the report of a case; some cases hold several trees, `variants`."""
    _, report = examine(root)
    if "variants" in expected:
        report["variants"] = {
            path.name: examine(path)[1].get("resctrl") for path in sorted(root.iterdir())
        }
    if "pressure" in expected and (root / "variants").is_dir():
        report["pressure"] = {
            f"{path.name.removeprefix('pressure-')}/{name}": lines
            for path in sorted((root / "variants").glob("pressure-*"))
            for name, lines in _object(examine(path)[1]["pressure"]).items()
        }
    if "pcp_expected" in expected:
        report["pcp_expected"] = in_words_of_pcp(report)
    if not (root / "proc" / "cpuinfo").exists():
        # Nothing else in a recording names the architecture; the report then says ''.
        assert report["arch"] == ""
        report["arch"] = expected["arch"]
    return report


def compare(expected: object, found: object, where: str, into: Comparison) -> None:
    """Hold every value of `expected` against `found`."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key, value in expected.items():
            if key in INFORMATIONAL and not where.count("."):
                continue
            if key in INFORMATIONAL and where == ".cgroup":
                continue
            compare(value, found.get(key, "(absent)"), f"{where}.{key}", into)
        if where.rpartition(".")[2] in EXACT and expected.keys() != found.keys():
            into.differences.append(f"{where}: too many: {sorted(found.keys() - expected.keys())}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            into.differences.append(f"{where}: expected {len(expected)} of them, found {found}")
        for number, (one, other) in enumerate(zip(expected, found, strict=False)):
            compare(one, other, f"{where}[{number}]", into)
    else:
        into.compared += 1
        if type(expected) is not type(found) or expected != found:
            into.differences.append(f"{where}: expected {expected!r}, found {found!r}")


def in_words_of_pcp(report: Json) -> Json:
    """Return our numbers under the names that Performance Co-Pilot gives them."""
    times = _object(report["cpu_ms"])
    nodes = [_object(node) for node in _list(report["nodes"])]
    per_node = {
        f"node{node}": _pcp_times(_object(of_node))
        for node, of_node in _object(times["nodes"]).items()
    }
    columns = next(iter(per_node.values()))

    def by_node(value: str) -> Json:
        return {f"node{node['id']}": node[value] for node in nodes}

    total, free = by_node("mem_total_kb"), by_node("mem_free_kb")
    return {
        "kernel.all.cpu_ms": _pcp_times(_object(times["all"])),
        "kernel.pernode.cpu_ms": {
            column: {node: found[column] for node, found in per_node.items()} for column in columns
        },
        "hinv.map.cpu_node": {
            f"cpu{cpu}": node["id"] for node in nodes for cpu in _cpus(str(node["online_cpus"]))
        },
        "mem.numa.alloc.local_node": {
            f"node{node['id']}": _object(node["numastat"])["local_node"] for node in nodes
        },
        "mem.numa.util.total": total,
        "mem.numa.util.free": free,
        "mem.numa.util.used": {
            node: int(str(total[node])) - int(str(free[node])) for node in total
        },
    }


def _pcp_times(times: Json) -> dict[str, int]:
    of = {name: int(str(value)) for name, value in times.items()}
    return {
        "user": of["user"],
        "nice": of["nice"],
        "sys": of["system"],
        "idle": of["idle"],
        "wait.total": of["iowait"],
        "irq.hard": of["irq"],
        "irq.soft": of["softirq"],
        "intr": of["irq"] + of["softirq"],
        "steal": of["steal"],
        "guest": of["guest"],
        "guest_nice": of["guest_nice"],
        "vuser": of["user"] - of["guest"],
        "vnice": of["nice"] - of["guest_nice"],
    }


def _cpus(text: str) -> list[int]:
    pairs = (part.partition("-") for part in text.split(",") if part)
    return [n for first, _, last in pairs for n in range(int(first), int(last or first) + 1)]


def _object(value: object) -> Json:
    assert isinstance(value, dict)
    return value


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
