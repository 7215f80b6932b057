"""What systemd is told about our units: one table, by systemd version. Pure.

Types are those of org.freedesktop.systemd1(5); `since` is the first version whose NEWS or
manual page names the property for transient units. An unknown property fails the whole
call, so what a version does not know is left out and, if it isolates, said.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentd.core.cpulist import format_list
from agentd.launch.protocol import LaunchSpec, ServiceClass
from corefleet.errors import Incompatible, InvalidInput

OLDEST_VERSION = 249
UNLIMITED = (1 << 64) - 1
CLASSES: tuple[ServiceClass, ...] = ("engine", "online", "batch")

_MPOL_BIND = 2
_OOM_SCORE: Mapping[ServiceClass, int] = {"batch": 700, "online": 400, "engine": 100}
_KIND_LETTER = {"worker": "w", "engine": "e"}
_LONGEST_PART = 100
_HOMES = ("/home", "/root", "/run/user")
_SHARED_TEMPORARY = ("/tmp", "/var/tmp")


@dataclass(slots=True, frozen=True)
class Known:
    """A property: its D-Bus type, since when, and what is lost without it ('': it must be)."""

    signature: str
    since: int
    without: str = ""


@dataclass(slots=True, frozen=True)
class Property:
    """A property's value as D-Bus takes it, with its type."""

    name: str
    signature: str
    value: Any


PROPERTIES: Mapping[str, Known] = {
    "Description": Known("s", 0),
    "Slice": Known("s", 0),
    "Type": Known("s", 0),
    "Restart": Known("s", 0),
    "ExecStart": Known("a(sasb)", 0),
    "KillMode": Known("s", 0),
    "TimeoutStopUSec": Known("t", 0),
    "CollectMode": Known("s", 236),
    "AddRef": Known("b", 232),
    "Environment": Known("as", 0),
    "WorkingDirectory": Known("s", 0),
    "StandardOutput": Known("s", 0),
    "StandardError": Known("s", 0),
    "SyslogIdentifier": Known("s", 0),
    "LogExtraFields": Known("aay", 236, "journal entries lack NODE, POOL, DOMAIN and UNIT"),
    "AllowedCPUs": Known("ay", 244),
    "AllowedMemoryNodes": Known("ay", 244),
    "NUMAPolicy": Known("i", 243),
    "NUMAMask": Known("ay", 243),
    "CPUWeight": Known("t", 232),
    "CPUQuotaPerSecUSec": Known("t", 0),
    "MemoryHigh": Known("t", 231),
    "MemoryMax": Known("t", 231),
    "MemorySwapMax": Known("t", 232, "a process at its memory limit may swap"),
    "TasksMax": Known("t", 227),
    "OOMPolicy": Known("s", 243),
    "OOMScoreAdjust": Known("i", 0),
    "DynamicUser": Known("b", 235),
    "NoNewPrivileges": Known("b", 0, "processes may gain privileges"),
    "CapabilityBoundingSet": Known("t", 0, "processes of root keep its capabilities"),
    "PrivateNetwork": Known("b", 0, "processes see the network"),
    "PrivateTmp": Known("b", 0, "processes see /tmp"),
    "PrivateIPC": Known("b", 248, "processes share System V IPC"),
    "ProtectSystem": Known("s", 214, "processes may write outside their directories"),
    "ReadWritePaths": Known("as", 231),
    "ReadOnlyPaths": Known("as", 231, "engines may change the replicas that they share"),
    "InaccessiblePaths": Known("as", 231, "workers may change the replicas of models"),
    "ProtectHome": Known("s", 214, "processes see home directories"),
    "ProtectProc": Known("s", 247, "processes see each other in procfs"),
    "ProtectKernelTunables": Known("b", 232, "processes may write kernel settings"),
    "ProtectKernelModules": Known("b", 232, "processes may load kernel modules"),
    "ProtectKernelLogs": Known("b", 244, "processes may read the kernel's log"),
    "ProtectControlGroups": Known("b", 232, "processes may write control groups"),
    "ProtectClock": Known("b", 245, "processes may set the clock"),
    "ProtectHostname": Known("b", 242, "processes may set the host name"),
    "LockPersonality": Known("b", 235, "processes may change their execution domain"),
    "RestrictRealtime": Known("b", 231, "processes may ask for realtime scheduling"),
    "RestrictSUIDSGID": Known("b", 242, "processes may make set-user-id files"),
    "RestrictAddressFamilies": Known("(bas)", 211, "processes may use any socket family"),
}


@dataclass(slots=True, frozen=True)
class Settings:
    """What all units of one agentd have in common.

    `cpus`: by domain, those that our slices may use. `batch_cpus`: by domain, the CPUs' worth
    of time that batch starts with; absent: all. `memory_nodes`: by domain, where its memory comes
    from; absent: the domain itself. `writable`: where workers and engines may write. `models`:
    where replicas lie; engines only read it, workers do not see it, if it is there before they
    start. `hidden`: what none of them sees, e.g. what agentd keeps for its successor. `numa`
    False: the kernel has no NUMA, memory is not bound.
    """

    node: str
    cpus: Mapping[int, tuple[int, ...]]
    batch_cpus: Mapping[int, float]
    memory_nodes: Mapping[int, tuple[int, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    numa: bool = True
    prefix: str = "corefleet"
    writable: tuple[Path, ...] = ()
    models: Path | None = None
    hidden: tuple[Path, ...] = ()
    environment: Mapping[str, str] | None = None
    working_directory: Path | None = None
    dynamic_user: bool = False
    stop_timeout_s: float = 10.0


def parse_version(text: str) -> int:
    """Return the major version in e.g. `252.39-1~deb12u1` or `v249`.

    Raises Incompatible for what is no version, and for those older than 249.
    """
    match = re.match(r"v?(\d+)", text)
    if match is None:
        raise Incompatible(f"systemd names no version: {text!r}; expected e.g. 252.39")
    version = int(match[1])
    if version < OLDEST_VERSION:
        raise Incompatible(f"systemd {version} is too old; expected {OLDEST_VERSION} or newer")
    return version


def mask(numbers: Iterable[int]) -> bytes:
    """Return CPUs or nodes as systemd's bit mask: bit n % 8 of byte n // 8."""
    value = 0
    for number in numbers:
        value |= 1 << number
    return value.to_bytes((value.bit_length() + 7) // 8, "little")


def slice_name(prefix: str, service_class: ServiceClass, domain: int) -> str:
    """Return the slice of a class and domain; by systemd's dash rule it lies in the class's."""
    return f"{prefix}-{service_class}-d{domain}.slice"


def slice_group(prefix: str, service_class: ServiceClass, domain: int) -> str:
    """Return the control group of a class and domain, below the mount."""
    return f"{prefix}.slice/{prefix}-{service_class}.slice/{prefix}-{service_class}-d{domain}.slice"


def unit_name(prefix: str, spec: LaunchSpec, random: str) -> str:
    """Return the name of a new unit; `random` makes it one that never was."""
    kind = _KIND_LETTER.get(spec.kind, _escaped(spec.kind))
    what = _escaped(spec.unit or spec.pool or spec.name)
    return f"{prefix}-{kind}-{what}-d{spec.domain}-{random}.service"


def is_unit_name(prefix: str, name: str) -> bool:
    """Whether `unit_name` makes such names."""
    return re.fullmatch(rf"{re.escape(prefix)}-.+-d\d+-[0-9a-f]+\.service", name) is not None


def is_slice_name(prefix: str, name: str) -> bool:
    """Whether a slice is one of ours that processes are started in."""
    classes = "|".join(CLASSES)
    return re.fullmatch(rf"{re.escape(prefix)}-({classes})-d\d+\.slice", name) is not None


def _escaped(text: str) -> str:
    """Return `text` as part of a unit name, other bytes as \\xNN: systemd-escape(1)."""
    kept = (
        char if char.isascii() and (char.isalnum() or char in ":_.-") else _hex(char)
        for char in text
    )
    return "".join(kept)[:_LONGEST_PART]


def _hex(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode())


def slice_properties(
    settings: Settings, service_class: ServiceClass, domain: int
) -> list[Property]:
    """Return what a slice carries: its CPUs and memory node, and batch its quota.

    Raises InvalidInput for a domain whose CPUs `settings` does not name.
    """
    cpus = settings.cpus.get(domain)
    if not cpus:
        known = format_list(settings.cpus)
        raise InvalidInput("domain", domain, f"one that has CPUs for slices: {known}")
    values: dict[str, Any] = {"AllowedCPUs": mask(cpus)}
    if settings.numa:
        values["AllowedMemoryNodes"] = mask(settings.memory_nodes.get(domain, (domain,)))
    if service_class == "batch":
        values["CPUQuotaPerSecUSec"] = quota(settings.batch_cpus.get(domain))
    return _typed(values)


def quota(cpus: float | None) -> int:
    """Return CPUs' worth of time as microseconds a second; None: no limit.

    Raises InvalidInput for what is not positive.
    """
    if cpus is None:
        return UNLIMITED
    if not cpus > 0:
        raise InvalidInput("cpus", cpus, "more than 0 CPUs' worth of time")
    return max(1, round(cpus * 1e6))


def limit_properties(settings: Settings, spec: LaunchSpec) -> list[Property]:
    """Return the binding and limits of a unit: what may be set again while it runs."""
    values: dict[str, Any] = {"AllowedCPUs": mask(spec.cpus)}
    if settings.numa:
        values["AllowedMemoryNodes"] = mask(spec.nodes)
    values |= {
        "CPUWeight": spec.cpu_weight,
        "MemoryHigh": spec.memory_high or UNLIMITED,
        "MemoryMax": spec.memory_max or UNLIMITED,
        "TasksMax": spec.tasks_max or UNLIMITED,
    }
    if spec.memory_max:
        values["MemorySwapMax"] = 0
    return _typed(values)


def unit_properties(
    settings: Settings, spec: LaunchSpec, binder: tuple[str, ...]
) -> list[Property]:
    """Return everything about a new unit; `binder` goes before its command."""
    argv = [_literal(word) for word in (*binder, *spec.command)]
    fields = {
        "NODE": settings.node,
        "POOL": spec.pool,
        "DOMAIN": str(spec.domain),
        "UNIT": spec.unit,
    }
    environment = {**(settings.environment or {}), **spec.environment}
    values: dict[str, Any] = {
        "Description": f"corefleet {spec.kind} {spec.name}",
        "Slice": slice_name(settings.prefix, spec.service_class, spec.domain),
        # Its start job fails when the first program cannot be executed.
        "Type": "exec",
        "Restart": "no",
        "ExecStart": [[binder[0], argv, False]],
        "KillMode": "control-group",
        "TimeoutStopUSec": round(settings.stop_timeout_s * 1e6),
        "CollectMode": "inactive-or-failed",
        # It stays until we have read how it ended, or our connection is gone.
        "AddRef": True,
        "StandardOutput": "journal",
        "StandardError": "journal",
        "SyslogIdentifier": f"{settings.prefix}-{spec.kind}",
        "LogExtraFields": [f"{k}={v}".encode() for k, v in fields.items() if v],
        "OOMPolicy": "continue",
        "OOMScoreAdjust": _OOM_SCORE[spec.service_class],
    }
    if environment:
        values["Environment"] = [f"{k}={v}" for k, v in environment.items()]
    if settings.working_directory is not None:
        values["WorkingDirectory"] = str(settings.working_directory)
    if settings.numa:
        values |= {"NUMAPolicy": _MPOL_BIND, "NUMAMask": mask(spec.nodes)}
    if settings.dynamic_user and spec.kind != "filler":
        values["DynamicUser"] = True
    if spec.kind in _KIND_LETTER:
        values |= _hardening(settings, spec, environment)
    return [*_typed(values), *limit_properties(settings, spec)]


def _hardening(
    settings: Settings, spec: LaunchSpec, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return what workers and engines may not do.

    No system call filter: one without @resources ends numactl.
    """
    places = [*spec.command, *environment.values(), *map(str, settings.writable)]
    if settings.working_directory is not None:
        places.append(str(settings.working_directory))
    values: dict[str, Any] = {
        "NoNewPrivileges": True,
        "CapabilityBoundingSet": 0,
        "PrivateNetwork": True,
        "PrivateIPC": True,
        "ProtectSystem": "strict",
        # What it is started from, or works on, may lie in a home directory.
        "ProtectHome": "read-only" if _below(places, _HOMES) else "yes",
        "ProtectProc": "invisible",
        "ProtectKernelTunables": True,
        "ProtectKernelModules": True,
        "ProtectKernelLogs": True,
        "ProtectControlGroups": True,
        "ProtectClock": True,
        "ProtectHostname": True,
        "LockPersonality": True,
        "RestrictRealtime": True,
        "RestrictSUIDSGID": True,
        "RestrictAddressFamilies": [True, ["AF_UNIX"]],
    }
    if settings.writable:
        values["ReadWritePaths"] = [f"-{path}" for path in settings.writable]
    # File modes do not hold: without DynamicUser all are the same user's.
    hidden = [f"-{path}" for path in settings.hidden]
    if settings.models is not None:
        if spec.kind == "engine":
            values["ReadOnlyPaths"] = [f"-{settings.models}"]
        else:
            hidden.append(f"-{settings.models}")
    if hidden:
        values["InaccessiblePaths"] = hidden
    if not _below(places, _SHARED_TEMPORARY):
        values["PrivateTmp"] = True
    return values


def known_to(
    version: int, properties: Iterable[Property], refused: Collection[str] = ()
) -> tuple[list[Property], list[str]]:
    """Return those that systemd `version` knows, and one line for each isolation left out.

    `refused`: names that this build turned down although its version should know them.
    """
    kept, lost = [], []
    for item in properties:
        known = PROPERTIES[item.name]
        if known.since <= version and item.name not in refused:
            kept.append(item)
        elif known.without:
            reason = f"systemd {version} does not know {item.name}"
            lost.append(f"{known.without}: {reason}")
    return kept, lost


def dispensable(name: str) -> bool:
    """Whether a unit may be started without this property, said in `unisolated`."""
    return name in PROPERTIES and bool(PROPERTIES[name].without)


def _typed(values: Mapping[str, Any]) -> list[Property]:
    return [Property(name, PROPERTIES[name].signature, value) for name, value in values.items()]


def _literal(word: str) -> str:
    """Return `word` so that systemd does not take `$` in it for a variable."""
    return word.replace("$", "$$")


def _below(places: Iterable[str], roots: tuple[str, ...]) -> bool:
    """Whether any of `places`, or the path in it, lies below one of `roots`."""
    found = (part for place in places for part in re.split(r"[=:,]", place))
    return any(part == root or part.startswith(f"{root}/") for part in found for root in roots)
