"""resctrl's schemata: its lines, and shares of bandwidth in the machine's own unit. Pure.

Formats: Linux, Documentation/filesystems/resctrl.rst and fs/resctrl/ctrlmondata.c; for Arm,
openEuler's MPAM manual (values padded with zeros, more lines, MB by NUMA node).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from corefleet.errors import Incompatible, InvalidInput

Unit = Literal["percent", "MBps", "eighth_GBps"]

BANDWIDTH_NAMES = ("MB", "MBMAX")
"""What kernels call the limit: MBMAX is older openEuler's name for it."""
UNLIMITED_MBPS = 4294967295
UNLIMITED_EIGHTHS = 2048
UNLIMITED_PERCENT = 100
LEAST_SHARE = 0.05
"""No class is squeezed below this: one that stands still holds its locks and its leases."""

# mba_MBps counts in MiB (the software controller shifts bytes by 20), AMD in GB/8.
_UNIT_BYTES: Mapping[Unit, int] = {"MBps": 1 << 20, "eighth_GBps": 125_000_000}
# A product such as 0.3 * 100 must not be lifted to the next step by its last bit.
_ROUNDING_SLACK = 1e-6


@dataclass(slots=True, frozen=True)
class Line:
    """One resource's line. `values` by domain id, as the kernel wrote them, '' for `3=`."""

    resource: str
    values: Mapping[int, str]
    initialised: bool = True
    """False for `L3:uninitialized`, a group that is being set up for pseudo-locking."""

    def numbers(self) -> dict[int, int]:
        """Return the decimal values by domain id, without those that are none."""
        return {
            domain: int(text)
            for domain, text in self.values.items()
            if text.isascii() and text.isdigit()
        }


@dataclass(slots=True, frozen=True)
class Schemata:
    """What a schemata file says, and what of it could not be read."""

    lines: Mapping[str, Line]
    warnings: tuple[str, ...] = ()

    def bandwidth(self) -> Line | None:
        """Return the line that limits memory bandwidth, None if there is none."""
        return next((self.lines[name] for name in BANDWIDTH_NAMES if name in self.lines), None)


def parse_schemata(text: str) -> Schemata:
    """Return the lines of `text`; nonsense is reported in `warnings` and survived."""
    lines: dict[str, Line] = {}
    warnings: list[str] = []
    for row in text.splitlines():
        if not row.strip():
            continue
        name, colon, rest = row.partition(":")
        resource = name.strip()
        if not colon or not resource:
            warnings.append(
                f"schemata: {row.strip()!r} is not valid; expected a line like MB:0=100"
            )
        elif resource in lines:
            warnings.append(f"schemata: {resource} is there twice; the first is used")
        elif rest.strip() == "uninitialized":
            lines[resource] = Line(resource, {}, initialised=False)
        else:
            lines[resource] = Line(resource, _values(resource, rest, warnings))
    return Schemata(lines, tuple(warnings))


def _values(resource: str, rest: str, warnings: list[str]) -> dict[int, str]:
    values: dict[int, str] = {}
    for part in rest.strip().split(";"):
        if not part.strip():
            continue
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not (key.isascii() and key.isdigit()):
            warnings.append(f"schemata: {resource}: {part!r} is not valid; expected id=value")
        elif int(key) in values:
            warnings.append(f"schemata: {resource}: domain {key} is there twice")
        else:
            values[int(key)] = value
    return values


def format_line(resource: str, values: Mapping[int, int]) -> str:
    """Return the line that sets `values` by domain id, with the end that the kernel demands.

    Raises InvalidInput for no values: the kernel refuses an empty line, and an empty write
    would change nothing without a word.
    """
    if not values:
        raise InvalidInput(resource, values, "at least one domain")
    return f"{resource}:{';'.join(f'{key}={values[key]}' for key in sorted(values))}\n"


@dataclass(slots=True, frozen=True)
class BandwidthControl:
    """How a machine limits memory bandwidth, in the unit of its schemata."""

    resource: str
    unit: Unit
    ids: tuple[int, ...]
    minimum: int
    granularity: int
    unlimited: int

    @property
    def full(self) -> int:
        """The largest value that the kernel keeps as it is: what no limit is written as."""
        if self.unit == "MBps":
            return self.unlimited
        return self.unlimited - self.unlimited % self.granularity

    @property
    def least(self) -> int:
        """The smallest value that may be written: never 0, which some machines obey.

        The kernel's minimum is a percentage, so it says nothing of MBps.
        """
        if self.unit == "MBps":
            return 1
        return min(self.read_back(max(self.minimum, 1)), self.full)

    def read_back(self, value: int) -> int:
        """Return what the kernel shows after `value` was written: it rounds up."""
        if self.unit == "MBps":
            return value
        return -(-value // self.granularity) * self.granularity

    def value(self, share: float | None, peak_bytes_per_s: float | None) -> int:
        """Return the value that gives `share` of the peak; None is no limit.

        A unit that is absolute and has no known peak stays unlimited. Raises InvalidInput
        for a share that is not above 0 and at most 1.
        """
        if share is None:
            return self.full
        if not 0 < share <= 1:
            raise InvalidInput("share", share, "a number above 0 and at most 1, or no limit")
        if share == 1:
            return self.full
        kept = max(share, LEAST_SHARE)
        if self.unit == "percent":
            exact = UNLIMITED_PERCENT * kept
        elif peak_bytes_per_s is None:
            return self.full
        else:
            exact = kept * peak_bytes_per_s / _UNIT_BYTES[self.unit]
        value = self.read_back(math.ceil(exact - _ROUNDING_SLACK))
        return min(max(value, self.least), self.full)


def bandwidth_control(
    info: Mapping[str, str],
    lines: Iterable[Line],
    *,
    arch: str,
    in_mbps: bool,
) -> BandwidthControl:
    """Return the control that the files of `info/MB` and the groups' MB lines describe.

    `info` is file name to text; `lines` are the root's first, then those of other groups;
    `in_mbps`: the mount options say mba_MBps. Raises Incompatible where the unit cannot be
    told for sure, because a percentage written to an absolute unit starves a machine.
    """
    kept = [line for line in lines if line.values]
    if not kept:
        raise Incompatible("resctrl: the root group's schemata has no line for memory bandwidth")
    seen = {value for line in kept for value in line.numbers().values()}
    minimum = _number(info, "min_bandwidth")
    granularity = max(_number(info, "bandwidth_gran") or 1, 1)
    unit, unlimited = _unit(_number(info, "delay_linear"), minimum, seen, arch, in_mbps)
    if unit != "MBps" and granularity > unlimited:
        raise Incompatible(f"resctrl: MB goes in steps of {granularity}, with {unlimited} the most")
    return BandwidthControl(
        resource=kept[0].resource,
        unit=unit,
        ids=tuple(sorted(kept[0].values)),
        minimum=minimum or 0,
        granularity=granularity,
        unlimited=unlimited,
    )


def _unit(
    linear: int | None, minimum: int | None, seen: set[int], arch: str, in_mbps: bool
) -> tuple[Unit, int]:
    """Return the unit and what is unlimited in it.

    AMD's control is not linear and has no minimum; Intel's is linear (one that is not cannot
    be set); openEuler's MPAM does not say, and is a percentage.
    """
    most = max(seen, default=0)
    if in_mbps or most == UNLIMITED_MBPS:
        return "MBps", UNLIMITED_MBPS
    if linear == 0:
        if minimum:
            raise Incompatible("resctrl: MB is not linear here, and the kernel cannot set that")
        return "eighth_GBps", max(most, UNLIMITED_EIGHTHS)
    if most > UNLIMITED_PERCENT:
        raise Incompatible(f"resctrl: MB has the value {most}, no percentage: its unit is unknown")
    if linear is None and not arch.startswith(("aarch64", "arm")):
        raise Incompatible("resctrl: info/MB has no delay_linear: the unit of MB is unknown")
    return "percent", UNLIMITED_PERCENT


def _number(info: Mapping[str, str], name: str) -> int | None:
    text = info.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


@dataclass(slots=True, frozen=True)
class Wanted:
    """What to write for each class, and what it cannot do, one line each."""

    values: Mapping[str, Mapping[int, int]]
    """By class: value by domain id of the control."""
    notes: tuple[str, ...] = ()

    def line(self, resource: str, service_class: str) -> str | None:
        """Return the text to write for a class, None if there is nothing to write."""
        values = self.values.get(service_class)
        return format_line(resource, values) if values else None


def wanted(
    control: BandwidthControl,
    covers: Mapping[int, tuple[int, ...]],
    shares: Mapping[str, Mapping[int, float | None]],
    peaks: Mapping[int, float],
    only: Collection[int] | None = None,
) -> Wanted:
    """Return the values that give each class its shares.

    `covers` is the NUMA domains below each id of the control, `shares` is class to domain to
    a fraction of the domain's peak (None or absent: no limit), `peaks` is bytes/s by domain.
    An id above several domains gets the largest of their shares, so that none is squeezed
    harder than was asked; a domain below several ids has its peak divided among them. `only`
    names the ids to answer for, None for all. Raises InvalidInput as `BandwidthControl.value`.
    """
    above: dict[int, int] = {}
    for domains in covers.values():
        for domain in domains:
            above[domain] = above.get(domain, 0) + 1
    values: dict[str, dict[int, int]] = {}
    notes: list[str] = []
    for service_class, asked in shares.items():
        mine = values.setdefault(service_class, {})
        for key, domains in sorted(covers.items()):
            if not domains or (only is not None and key not in only):
                continue
            share, note = _largest(service_class, key, [asked.get(d) for d in domains])
            notes.extend(note)
            known = [peaks[d] / above[d] for d in domains if peaks.get(d, 0) > 0]
            peak = sum(known) if len(known) == len(domains) else None
            if share is not None and peak is None and control.unit != "percent":
                notes.append(
                    f"{service_class}: {control.resource} {key} stays unlimited: its unit is "
                    f"absolute and the peak of domain {domains[0]} is not known"
                )
            mine[key] = control.value(share, peak)
    return Wanted(values, tuple(notes))


def _largest(
    service_class: str, key: int, asked: list[float | None]
) -> tuple[float | None, list[str]]:
    limits = [share for share in asked if share is not None]
    largest = max(limits) if len(limits) == len(asked) else None
    if len(set(asked)) == 1:
        return largest, []
    shown = "no limit" if largest is None else f"{largest:.2f}"
    return largest, [f"{service_class}: MB {key} spans domains with other shares: gets {shown}"]
