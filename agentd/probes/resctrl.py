"""What resctrl can control and monitor here."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from agentd.core.fold import Facts
from agentd.core.topology import Control, Resctrl
from agentd.hostfs import HostFs
from agentd.probes.mounts import mounts_of

BASE = "sys/fs/resctrl"
_BANDWIDTH = frozenset({"MB", "SMBA"})
_MOST_PERCENT = 100
_UNLIMITED_MBPS = 4294967295
"""What mba_MBps mode prints for a domain without a limit (u32)."""

Unit = Literal["percent", "MBps", "eighth_GBps", "mask"]


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `resctrl`; None where the kernel has none."""
    names = host.directories(f"{BASE}/info")
    if not names:
        if host.exists(BASE):
            facts.resctrl = Resctrl(mounted=False)
        return
    options = {
        option for mount in mounts_of(host) if mount.kind == "resctrl" for option in mount.options
    }
    schemata = values_by_domain(host.attribute(f"{BASE}/schemata") or "")
    controls: dict[str, Control] = {}
    monitors: list[str] = []
    rmids = 0
    for name in names:
        base = f"{BASE}/info/{name}"
        if name.endswith("_MON"):
            monitors += (host.attribute(f"{base}/mon_features") or "").split()
            rmids = max(rmids, _number(host, f"{base}/num_rmids") or 0)
            continue
        closids = _number(host, f"{base}/num_closids")
        if closids is None:
            facts.warnings.append(f"{base}: no number of classes in num_closids: not used")
            continue
        least = _number(host, f"{base}/min_bandwidth")
        controls[name] = Control(
            resource=name,
            closids=closids,
            min_bandwidth=least,
            granularity=_number(host, f"{base}/bandwidth_gran"),
            unit=_unit(host, base, name, schemata.get(name, {}), options, least),
        )
    facts.resctrl = Resctrl(
        mounted=True,
        controls=MappingProxyType(controls),
        monitors=tuple(dict.fromkeys(monitors)),
        rmids=rmids,
    )


def values_by_domain(schemata: str) -> dict[str, dict[str, str]]:
    """Return each resource's values by domain id, as text: masks, percents, MB/s.

    Names are padded on the left and values on either side; a line without domains, such as
    `L3:uninitialized`, and one without a colon are left out.
    """
    found: dict[str, dict[str, str]] = {}
    for line in schemata.splitlines():
        name, colon, rest = line.partition(":")
        pairs = [part.partition("=") for part in rest.split(";")]
        values = {
            domain.strip(): value.strip()
            for domain, sign, value in pairs
            if sign and domain.strip()
        }
        if colon and values:
            found[name.strip()] = values
    return found


def _unit(
    host: HostFs,
    base: str,
    name: str,
    values: dict[str, str],
    options: set[str],
    least: int | None,
) -> Unit:
    """Tell the unit of MB, which no file names.

    mba_MBps: a mount option, or the value of an unlimited domain. AMD: `delay_linear` 0
    with no least bandwidth, in eighths of GB/s, 2048 being unlimited; Intel's non-linear
    throttling has a least one, and the kernel refuses to set it.
    """
    if name not in _BANDWIDTH:
        return "mask"
    numbers = [int(value) for value in values.values() if value.isdecimal()]
    if "mba_MBps" in options or _UNLIMITED_MBPS in numbers:
        return "MBps"
    linear = _number(host, f"{base}/delay_linear")
    if linear == 0 and (not least or max(numbers, default=0) > _MOST_PERCENT):
        return "eighth_GBps"
    return "percent"


def _number(host: HostFs, path: str) -> int | None:
    text = (host.attribute(path) or "").strip()
    return int(text) if text.isdecimal() else None
