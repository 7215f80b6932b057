"""Our units and slices in systemd: made, bound again, read when they end, and removed."""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from dbus_fast import Variant

from agentd.core.cpulist import parse_list
from agentd.hostfs import HostFs
from agentd.launch.binder import Binder
from agentd.launch.bus import (
    NO_SUCH_UNIT,
    PROPERTY_REFUSED,
    UNIT_EXISTS,
    Properties,
    Refused,
    Systemd,
)
from agentd.launch.kept import KeptSpecs
from agentd.launch.limits import OomKills
from agentd.launch.properties import (
    Property,
    Settings,
    dispensable,
    known_to,
    limit_properties,
    quota,
    slice_group,
    slice_name,
    slice_properties,
    unit_name,
    unit_properties,
)
from agentd.launch.protocol import ExitStatus, LaunchSpec, ServiceClass
from corefleet.errors import InvalidInput, LaunchFailed

_RANDOM_BYTES = 6
_FIRST_LOOK_S = 0.002
_LONGEST_LOOK_S = 0.1
_CLD_EXITED = 1
_UNSET_PID = 0

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(slots=True, frozen=True)
class Deadlines:
    """How long we wait: for one answer, for a unit to start or stop, for the way it ended,
    and for a changed setting to reach the kernel."""

    call_s: float = 10.0
    job_s: float = 30.0
    verdict_s: float = 2.0
    applied_s: float = 2.0


@dataclass(slots=True, frozen=True)
class Running:
    """A unit that runs: its first process, and its control group below the mount."""

    unit: str
    pid: int
    group: str


class Units:
    """What SystemdLauncher and its processes ask of systemd."""

    def __init__(
        self,
        systemd: Systemd,
        host: HostFs,
        settings: Settings,
        kept: KeptSpecs,
        version: int,
        binder: Binder,
        deadlines: Deadlines,
    ) -> None:
        self.host = host
        self.settings = settings
        self.kept = kept
        self.deadlines = deadlines
        self._systemd = systemd
        self._version = version
        self._binder = binder
        self._refused: set[str] = set()
        self._lost: dict[str, None] = {}
        self._quotas: dict[int, float | None] = dict(settings.batch_cpus)
        self._made: set[str] = set()
        self._making = asyncio.Lock()
        self._doomed: set[str] = set()
        self.oom = OomKills(host)

    @property
    def lost(self) -> tuple[str, ...]:
        """One line for each isolation that this systemd turned down."""
        return tuple(self._lost)

    def quota_of(self, domain: int) -> float | None:
        """Return the CPUs' worth of time that batch has in `domain`; None: all."""
        return self._quotas.get(domain)

    async def make_slice(self, service_class: ServiceClass, domain: int) -> str:
        """Make the slice of a class and domain, or set up the one there is; return its name."""
        name = slice_name(self.settings.prefix, service_class, domain)
        async with self._making:
            if name not in self._made:
                await self._set_up_slice(name, service_class, domain)
                self._made.add(name)
        self.oom.begin(slice_group(self.settings.prefix, service_class, domain))
        return name

    async def make(self, spec: LaunchSpec) -> str:
        """Start a unit that runs `spec`; return its name once systemd has exec'd it.

        Raises LaunchFailed; then nothing is left of it.
        """
        await self.make_slice(spec.service_class, spec.domain)
        binder = self._binder.command(spec.cpus, spec.nodes)
        properties = unit_properties(self.settings, spec, binder)

        async def attempt(known: Properties) -> str:
            # A refused one may linger: each attempt has a name of its own.
            unit = unit_name(self.settings.prefix, spec, secrets.token_hex(_RANDOM_BYTES))
            await asyncio.to_thread(self.kept.keep, unit, spec)
            try:
                deadline = self.deadlines.job_s
                result = await self._systemd.start_transient(unit, known, deadline)
                if result != "done":
                    said = await self._said(unit)
                    raise LaunchFailed(f"{spec.name}: {unit} did not start: job {result}{said}")
            except BaseException:  # an unbound process must not go on, whatever ended this
                await asyncio.shield(self.discard(unit))
                raise
            return unit

        try:
            return await self._with_known(properties, attempt)
        except OSError as error:
            raise LaunchFailed(f"{spec.name}: its spec cannot be kept: {error}") from error

    async def running(self, unit: str) -> Running | None:
        """Return a unit's first process; None when it has none (any more)."""
        service = await self._systemd.properties(unit, "Service")
        pid = int(service["MainPID"])
        if pid == _UNSET_PID:
            return None
        return Running(unit, pid, str(service["ControlGroup"]).strip("/"))

    async def service(self, unit: str) -> dict[str, Any]:
        """Return what systemd says of a service."""
        return await self._systemd.properties(unit, "Service")

    async def loaded(self) -> tuple[str, ...]:
        """Return all loaded services with our prefix, those of other programs too."""
        pattern = f"{self.settings.prefix}-*.service"
        answer = await self._systemd.manager("ListUnitsByPatterns", "asas", [], [pattern])
        return tuple(str(row[0]) for row in answer[0])

    async def hold(self, unit: str) -> bool:
        """Keep a unit in memory until it is discarded; False if it is gone."""
        try:
            await self._systemd.manager("RefUnit", "s", unit)
        except Refused as error:
            if error.name == NO_SUCH_UNIT:
                return False
            raise
        return True

    async def apply(self, unit: str, spec: LaunchSpec) -> None:
        """Set binding and limits of a unit and its slice again."""
        slice_ = slice_name(self.settings.prefix, spec.service_class, spec.domain)
        self._made.discard(slice_)
        await self.make_slice(spec.service_class, spec.domain)
        await self._set(unit, limit_properties(self.settings, spec))

    async def squeeze(self, domain: int, cpus: float | None) -> None:
        """Let batch of `domain` use so many CPUs' worth of time; None: all."""
        value = quota(cpus)
        name = await self.make_slice("batch", domain)
        await self._set(name, [Property("CPUQuotaPerSecUSec", "t", value)])
        self._quotas[domain] = cpus

    async def allow_cpus(self, unit: str, allowed: bytes) -> None:
        """Set the CPUs of a unit that is not ours; no matter if there is none."""
        try:
            await self._set(unit, [Property("AllowedCPUs", "ay", allowed)])
        except Refused as error:
            if error.name != NO_SUCH_UNIT:
                raise

    async def kill(self, unit: str) -> None:
        """Kill all that runs in a unit; no matter if nothing does."""
        try:
            await self._systemd.manager("KillUnit", "ssi", unit, "all", int(signal.SIGKILL))
        except Refused as error:
            _log.debug("Nothing to kill", unit=unit, reason=str(error))

    async def verdict(self, unit: str, spec: LaunchSpec) -> ExitStatus:
        """Return how a dead unit ended; `lost` when systemd does not say within the deadline.

        The pidfd may tell us before systemd has reaped the process.
        """
        pause = _FIRST_LOOK_S
        try:
            async with asyncio.timeout(self.deadlines.verdict_s):
                while True:
                    service = await self.service(unit)
                    if int(service.get("ExecMainExitTimestampMonotonic", 0)):
                        return self._status(service, spec)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LONGEST_LOOK_S)
        except (TimeoutError, LaunchFailed) as error:
            _log.warning("Nobody says how it ended", unit=unit, reason=str(error) or "no answer")
            return ExitStatus(lost=True)

    async def discard(self, unit: str) -> None:
        """Kill, stop and unload a unit and forget its spec.

        Without systemd that is done when it is back (`again`).
        """
        try:
            await self.kill(unit)
            await self._unload(unit)
        except LaunchFailed as error:
            self._doomed.add(unit)
            _log.warning("A unit is left for later", unit=unit, reason=str(error))
            return
        self._doomed.discard(unit)
        await asyncio.to_thread(self.kept.forget, unit)

    async def again(self, held: Iterable[str]) -> None:
        """After a reconnection: hold units again, and remove what could not be."""
        for unit in held:
            await self.hold(unit)
        for unit in tuple(self._doomed):
            await self.discard(unit)

    def gone(self, domain: int, service_class: ServiceClass) -> str | None:
        """Return why nothing can be bound to a domain's memory any more, None if it can."""
        group = slice_group(self.settings.prefix, service_class, domain)
        for path in (
            "sys/devices/system/node/online",
            f"sys/fs/cgroup/{group}/cpuset.mems.effective",
        ):
            text = self.host.read(path)
            try:
                if text is not None and domain not in parse_list(text, path):
                    return f"node gone: {path} is {text.strip()!r}, without domain {domain}"
            except InvalidInput as error:
                _log.warning("Unreadable", reason=str(error))
        return None

    async def _unload(self, unit: str) -> None:
        try:
            await self._systemd.stop(unit, self.deadlines.job_s)
        except Refused as error:
            _log.debug("Nothing to stop", unit=unit, reason=str(error))
        for member in ("ResetFailedUnit", "UnrefUnit"):
            try:
                await self._systemd.manager(member, "s", unit)
            except Refused as error:
                _log.debug("Nothing to unload", unit=unit, reason=str(error))

    async def _set_up_slice(self, name: str, service_class: ServiceClass, domain: int) -> None:
        try:
            properties = slice_properties(self.settings, service_class, domain)
        except InvalidInput as error:
            raise LaunchFailed(f"{name}: {error}") from error
        if service_class == "batch":
            properties = [item for item in properties if item.name != "CPUQuotaPerSecUSec"]
            value = quota(self._quotas.get(domain))
            properties.append(Property("CPUQuotaPerSecUSec", "t", value))

        async def attempt(known: Properties) -> None:
            try:
                result = await self._systemd.start_transient(name, known, self.deadlines.job_s)
            except Refused as error:
                if error.name != UNIT_EXISTS:
                    raise
                await self._systemd.set_properties(name, known)
                result = "done"
            if result != "done":
                raise LaunchFailed(f"{name} did not start: job {result}")

        await self._with_known(properties, attempt)

    async def _set(self, unit: str, properties: list[Property]) -> None:
        async def attempt(known: Properties) -> None:
            await self._systemd.set_properties(unit, known)

        await self._with_known(properties, attempt)

    async def _with_known(
        self, properties: list[Property], attempt: Callable[[Properties], Awaitable[T]]
    ) -> T:
        """Call `attempt` with what this systemd knows, less what it turns down, if it may."""
        while True:
            kept, lost = known_to(self._version, properties, self._refused)
            try:
                result = await attempt(
                    tuple((item.name, Variant(item.signature, item.value)) for item in kept)
                )
            except Refused as error:
                found = re.search(r"Cannot set property (\w+)", error.text)
                name = found[1] if found is not None else ""
                may_go = dispensable(name) and name not in self._refused
                if error.name != PROPERTY_REFUSED or not may_go:
                    raise
                self._refused.add(name)
                _log.warning("systemd does not know a property", property=name)
                continue
            self._lost.update(dict.fromkeys(lost))
            return result

    async def _said(self, unit: str) -> str:
        """Return how a unit failed, for a message."""
        try:
            service = await self.service(unit)
        except LaunchFailed:
            # It is told of as failed already; this would only add detail.
            return ""
        return f", result {service.get('Result')}, status {service.get('ExecMainStatus')}"

    def _status(self, service: dict[str, Any], spec: LaunchSpec) -> ExitStatus:
        status = int(service["ExecMainStatus"])
        if int(service["ExecMainCode"]) == _CLD_EXITED:
            return ExitStatus(code=status, oom=service.get("Result") == "oom-kill")
        # With OOMPolicy=continue systemd may call it a signal; the slice counts such kills.
        oom = service.get("Result") == "oom-kill"
        if status == signal.SIGKILL and self.oom.take(self.slice_of(spec)):
            oom = True
        return ExitStatus(signal=status, oom=oom)

    def slice_of(self, spec: LaunchSpec) -> str:
        """Return the control group of the slice that a spec's unit lies in."""
        return slice_group(self.settings.prefix, spec.service_class, spec.domain)
