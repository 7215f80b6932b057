"""Performance counters as the kernel describes them under `event_source/devices`.

Formats: the kernel's Documentation/ABI/testing/sysfs-bus-event_source-devices-format
(`config:0-7,32-35`) and -events (`event=0x04,umask=0x03`, NAME.scale, NAME.unit).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentd.core.cpulist import parse_list
from agentd.hostfs import HostFs
from corefleet.errors import InvalidInput

DEVICES = "sys/bus/event_source/devices"

_FORMAT = re.compile(r"(config[12]?):(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\Z")
_REGISTERS = ("config", "config1", "config2")
_REGISTER_BITS = 64
_UNITS = {"Bytes": 1.0, "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


@dataclass(slots=True, frozen=True)
class Event:
    """What perf_event_open is asked to count."""

    name: str
    """For people, e.g. `uncore_imc_0/cas_count_read`."""
    kind: int
    """perf_event_attr's `type`: the device's number."""
    config: int = 0
    config1: int = 0
    config2: int = 0


@dataclass(slots=True, frozen=True)
class Field:
    """Where a term's value goes: `bits` of a register, the value's lowest bit first."""

    register: str
    bits: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Device:
    """One counter unit, e.g. a memory controller's."""

    name: str
    kind: int
    cpus: tuple[int, ...]
    """Its cpumask: the CPUs that read it, one for each socket or die."""
    formats: Mapping[str, Field] = field(default_factory=dict)
    events: Mapping[str, str] = field(default_factory=dict)
    """Terms by event name."""


def parse_format(text: str, what: str) -> Field:
    """Return where a term goes; raises InvalidInput naming `what`."""
    match = _FORMAT.match(text.strip())
    bits: list[int] = []
    for part in match[2].split(",") if match else ():
        first, _, last = part.partition("-")
        bits.extend(range(int(first), min(int(last or first), _REGISTER_BITS) + 1))
    if match is None or not bits or max(bits) >= _REGISTER_BITS:
        raise InvalidInput(what, text, "bits of a register such as config:0-7,32-35")
    return Field(match[1], tuple(bits))


def encode(device: Device, terms: str, name: str) -> Event:
    """Return the event that `terms` (e.g. `event=0x04,umask=0x03`) spell on a device.

    Raises InvalidInput for a term that the device has no format of, and for a value that is
    no number or does not fit.
    """
    what = f"{device.name}/{name}"
    registers = dict.fromkeys(_REGISTERS, 0)
    for term in filter(None, (part.strip() for part in terms.split(","))):
        key, _, text = term.partition("=")
        try:
            value = int(text, 0) if text else 1
        except ValueError:
            raise InvalidInput(what, terms, "numbers as values") from None
        place = device.formats.get(key)
        if place is None and key in registers:
            place = Field(key, tuple(range(_REGISTER_BITS)))
        if place is None:
            raise InvalidInput(what, terms, f"terms among {', '.join(sorted(device.formats))}")
        if not 0 <= value < 1 << len(place.bits):
            raise InvalidInput(what, terms, f"a {key} of {len(place.bits)} bits")
        for index, bit in enumerate(place.bits):
            registers[place.register] |= (value >> index & 1) << bit
    return Event(what, device.kind, *(registers[register] for register in _REGISTERS))


def read_device(host: HostFs, name: str) -> Device | None:
    """Return a device of the event source bus, None if it has no usable number or cpumask."""
    base = f"{DEVICES}/{name}"
    kind = (host.read(f"{base}/type") or "").strip()
    try:
        cpus = parse_list(host.read(f"{base}/cpumask") or "", f"{name}/cpumask")
        formats = {
            key: parse_format(host.read(f"{base}/format/{key}") or "", f"{name}/format/{key}")
            for key in host.names(f"{base}/format")
        }
    except InvalidInput:
        return None
    if not kind.isdecimal() or not cpus:
        return None
    events = {
        key: (host.read(f"{base}/events/{key}") or "").strip()
        for key in host.names(f"{base}/events")
        if not key.endswith((".scale", ".unit", ".per-pkg", ".snapshot"))
    }
    return Device(name, int(kind), cpus, formats, events)


def bytes_per_count(host: HostFs, device: str, event: str, otherwise: float) -> float:
    """Return scale times unit of an event; `otherwise` if the kernel gives no scale.

    Raises InvalidInput for a scale that is no positive number, or a unit that is no bytes.
    """
    base = f"{DEVICES}/{device}/events/{event}"
    scale, unit = host.read(f"{base}.scale"), host.read(f"{base}.unit")
    if scale is None:
        return otherwise
    try:
        number = float(scale)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidInput(f"{device}/{event}.scale", scale, "a positive number")
    factor = _UNITS.get((unit or "").strip())
    if factor is None:
        raise InvalidInput(f"{device}/{event}.unit", unit, " or ".join(_UNITS))
    return number * factor
