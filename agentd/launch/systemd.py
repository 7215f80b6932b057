"""The systemd launcher: transient units over D-Bus, which outlive agentd and are adopted.

Rules 3 to 8 and 10 of the node (docs/architecture.md) are kept here and in the modules that
this one puts together: properties (what systemd is told), bus (how), units (in what order).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from agentd.core.cpulist import parse_list
from agentd.hostfs import HostFs
from agentd.launch.binder import becomes_command, bind_threads, find_binder
from agentd.launch.bus import Refused, Systemd
from agentd.launch.kept import KeptSpecs
from agentd.launch.limits import at_high, group_of, wrong_limits, wrong_quota
from agentd.launch.properties import (
    Settings,
    is_slice_name,
    is_unit_name,
    mask,
    parse_version,
    slice_group,
)
from agentd.launch.protocol import SERVICE_CLASSES, ExitStatus, LaunchSpec, ServiceClass
from agentd.launch.units import Deadlines, Running, Units
from agentd.launch.verify import wrong_binding
from corefleet.background import Background
from corefleet.errors import CorruptRecord, Incompatible, LaunchFailed

_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
_CONFINED = ("system.slice", "user.slice", "init.scope")
_LOOK_EVERY_S = 0.02

_log = structlog.get_logger(__name__)


class SystemdProcess:
    """A unit of ours, watched through the pidfd of its first process."""

    def __init__(
        self,
        units: Units,
        running: Running,
        spec: LaunchSpec,
        pidfd: int,
        background: Background,
        ended: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self.unit = running.unit
        self._running = running
        self._units = units
        self._background = background
        self._on_end = ended
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._killed = False
        self._burial: asyncio.Task[None] | None = None
        self._pidfd: int | None = pidfd
        self._loop.add_reader(pidfd, self._dead)

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def name(self) -> str:
        return self.spec.name

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._ended)

    def last_words(self) -> str:
        # They are in the journal: reading that takes longer than a restart may.
        return ""

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        # What it started is killed when its death is seen.
        self._killed = True
        self._signal(signal.SIGKILL)

    async def drift(self) -> str | None:
        if self._pidfd is None:
            return None
        wrong = await asyncio.to_thread(self._wrong)
        self._units.oom.settle(self._units.slice_of(self.spec), self._loop.time())
        # It may have ended while we looked.
        if self._pidfd is None or _has_ended(self._pidfd):
            return None
        return wrong

    async def throttled(self) -> bool:
        return await asyncio.to_thread(at_high, self._units.host, self._running.group, self.spec)

    async def rebind(self) -> None:
        await self._units.apply(self.unit, self.spec)
        # systemd answers before it has written to the control groups.
        until = self._loop.time() + self._units.deadlines.applied_s
        while True:
            try:
                await asyncio.to_thread(bind_threads, self._units.host, self.pid, self.spec)
                refused = None
            except LaunchFailed as error:
                refused = error
            if refused is None and await self.drift() is None:
                return
            if self._loop.time() > until:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        if refused is not None:
            raise refused

    async def removed(self) -> None:
        """Return once it has ended and nothing is left of its unit."""
        await self.wait()
        if self._burial is not None:
            await asyncio.wait((self._burial,))

    def release(self) -> None:
        """Watch it no more."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _dead(self) -> None:
        self.release()
        self._burial = self._background.spawn(self._bury(), f"end of {self.unit}")

    async def _bury(self) -> None:
        try:
            await self._units.kill(self.unit)
        except LaunchFailed as error:
            _log.warning("What it started may still run", unit=self.unit, reason=str(error))
        status = await self._units.verdict(self.unit, self.spec)
        if self._killed and status.oom:
            status = ExitStatus(code=status.code, signal=status.signal)
        if not self._ended.done():
            self._ended.set_result(status)
        self._on_end(self.unit)
        await self._units.discard(self.unit)

    def _wrong(self) -> str | None:
        """Compare the kernel's state with the spec; blocks for as long as procfs does."""
        units, spec = self._units, self.spec
        host, numa = units.host, units.settings.numa
        wrong = wrong_binding(host, self.pid, spec.cpus, spec.nodes, numa)
        wrong = wrong or wrong_limits(host, self._running.group, spec, numa)
        if wrong is None and spec.service_class == "batch":
            wrong = wrong_quota(host, units.slice_of(spec), units.quota_of(spec.domain))
        return wrong


class SystemdLauncher:
    """Starts processes as transient units of systemd. Made by `find`."""

    def __init__(self, systemd: Systemd, units: Units, unisolated: tuple[str, ...]) -> None:
        self._systemd = systemd
        self._units = units
        self._unisolated = unisolated
        self._loop = asyncio.get_running_loop()
        self._processes: dict[str, SystemdProcess] = {}
        self._background = Background(
            lambda error: _log.error("A unit's end went wrong", reason=repr(error))
        )
        systemd.when_back(lambda: units.again(tuple(self._processes)))

    @classmethod
    async def find(
        cls,
        host: HostFs,
        state_dir: Path,
        settings: Settings,
        bus_address: str | None = None,
        deadlines: Deadlines | None = None,
    ) -> SystemdLauncher:
        """Return a launcher for this machine; specs of units are kept in `state_dir`.

        Raises Incompatible without cgroup v2 alone, without systemd 249 or newer on the bus
        (None: the system bus), or without numactl.
        """
        _check_cgroups(host)
        binder = find_binder(memory=settings.numa)
        deadlines = deadlines or Deadlines()
        try:
            systemd = await Systemd.connect(bus_address, deadlines.call_s)
        except LaunchFailed as error:
            raise Incompatible(f"no systemd to start units with: {error}") from error
        try:
            version = parse_version(await systemd.version())
        except LaunchFailed as error:
            await systemd.close()
            raise Incompatible(f"systemd does not name its version: {error}") from error
        except Incompatible:
            await systemd.close()
            raise
        kept = KeptSpecs(state_dir)
        units = Units(systemd, host, settings, kept, version, binder, deadlines)
        unbound = "memory is not bound to its domain: the kernel has no NUMA nodes"
        return cls(systemd, units, () if settings.numa else (unbound,))

    @property
    def outlives(self) -> bool:
        return True

    @property
    def systemd(self) -> Systemd:
        """The connection to systemd, for units that are no processes."""
        return self._systemd

    @property
    def unisolated(self) -> tuple[str, ...]:
        return (*self._unisolated, *self._units.lost)

    async def start(self, spec: LaunchSpec) -> SystemdProcess:
        try:
            unit = await self._units.make(spec)
        except LaunchFailed as error:
            raise self._explained(error, spec) from error
        process: SystemdProcess | None = None
        try:
            running = await self._units.running(unit)
            process = self._watch(running, spec) if running is not None else None
            if process is None:
                await self._ended_at_once(unit, spec)
            else:
                await self._verify(process)
                return process
        except BaseException:  # whatever ended this, an unbound process must not go on
            await asyncio.shield(self._undo(unit, process))
            raise
        raise AssertionError("a unit without a process is a failure")

    async def adopt(self) -> tuple[SystemdProcess, ...]:
        adopted = []
        loaded = [unit for unit in await self._units.loaded() if await self._is_ours(unit)]
        kept = await asyncio.to_thread(self._units.kept.units)
        for unit in loaded:
            process = await self._adopt(unit)
            if process is not None:
                adopted.append(process)
        for unit in set(kept) - set(loaded):
            _log.warning("A process ended while nobody watched", unit=unit)
            await asyncio.to_thread(self._units.kept.forget, unit)
        return tuple(adopted)

    async def squeeze(self, domain: int, cpus: float | None) -> None:
        await self._units.squeeze(domain, cpus)

    async def groups(self, domain: int) -> dict[ServiceClass, str]:
        units = self._units
        found: dict[ServiceClass, str] = {}
        for service_class in SERVICE_CLASSES:
            await units.make_slice(service_class, domain)
            group = slice_group(units.settings.prefix, service_class, domain)
            found[service_class] = f"sys/fs/cgroup/{group}"
        return found

    async def confine_system(self, cpus: Sequence[int]) -> None:
        """Keep all that is not ours on `cpus` until the next boot, or `release_system`."""
        for unit in _CONFINED:
            await self._units.allow_cpus(unit, mask(cpus))

    async def release_system(self) -> None:
        """Let all that is not ours run on every CPU again."""
        host = self._units.host
        every = parse_list(host.read("sys/devices/system/cpu/possible") or "", "possible")
        for unit in _CONFINED:
            # The kernel takes no empty list for a group that has processes: first all CPUs.
            await self._units.allow_cpus(unit, mask(every))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._units.deadlines.applied_s):
                while any(self._confined(unit, every) for unit in _CONFINED):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_EVERY_S)
        for unit in _CONFINED:
            await self._units.allow_cpus(unit, b"")

    def _confined(self, unit: str, every: tuple[int, ...]) -> bool:
        text = self._units.host.read(f"sys/fs/cgroup/{unit}/cpuset.cpus")
        return bool(text and text.strip()) and parse_list(text or "", unit) != every

    async def close(self) -> None:
        for process in self._processes.values():
            process.release()
        self._processes.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._units.deadlines.call_s):
                await self._background.drained()
        await self._background.close()
        await self._systemd.close()

    async def _adopt(self, unit: str) -> SystemdProcess | None:
        """Watch a unit of an earlier agentd; None, and nothing left of it, if that cannot be."""
        try:
            spec = await asyncio.to_thread(self._units.kept.read, unit)
        except CorruptRecord as error:
            _log.error("A unit that nobody knows is stopped", unit=unit, reason=str(error))
            await self._units.discard(unit)
            return None
        running = await self._units.running(unit) if await self._units.hold(unit) else None
        process = self._watch(running, spec) if running is not None else None
        if process is None:
            _log.warning("A process ended while nobody watched", unit=unit, process=spec.name)
            await self._units.discard(unit)
            return None
        try:
            await self._units.make_slice(spec.service_class, spec.domain)
        except LaunchFailed as error:
            _log.warning("A slice cannot be set up", unit=unit, reason=str(error))
        wrong = await process.drift()
        if wrong is not None:
            _log.warning("An adopted process is not bound as it was", unit=unit, reason=wrong)
        return process

    async def _is_ours(self, unit: str) -> bool:
        """Whether a unit was started by an agentd of this node."""
        if not is_unit_name(self._units.settings.prefix, unit):
            return False
        try:
            service = await self._units.service(unit)
        except Refused:
            # It was unloaded since it was listed.
            return False
        node = f"NODE={self._units.settings.node}".encode()
        return is_slice_name(self._units.settings.prefix, str(service.get("Slice"))) and (
            node in (bytes(field) for field in service.get("LogExtraFields", ()))
        )

    def _watch(self, running: Running, spec: LaunchSpec) -> SystemdProcess | None:
        """Return the running unit as a process; None when its process has just ended."""
        try:
            pidfd = os.pidfd_open(running.pid)
        except ProcessLookupError:
            return None
        # Its number may have been given to another process before the pidfd held it.
        if group_of(self._units.host, running.pid) != running.group:
            os.close(pidfd)
            return None
        process = SystemdProcess(self._units, running, spec, pidfd, self._background, self._forget)
        self._processes[running.unit] = process
        return process

    def _forget(self, unit: str) -> None:
        self._processes.pop(unit, None)

    async def _verify(self, process: SystemdProcess) -> None:
        spec = process.spec
        try:
            deadline = self._units.deadlines.job_s
            await becomes_command(self._units.host, process, spec.command, deadline)
        except LaunchFailed as error:
            raise self._explained(error, spec) from error
        wrong = await process.drift()
        if wrong is not None:
            raise LaunchFailed(f"{spec.name}: not bound: {wrong}")

    async def _ended_at_once(self, unit: str, spec: LaunchSpec) -> None:
        status = await self._units.verdict(unit, spec)
        raise self._explained(LaunchFailed(f"{spec.name}: ended at once: {status}"), spec)

    def _explained(self, error: LaunchFailed, spec: LaunchSpec) -> LaunchFailed:
        """Say that the node is gone: numactl and systemd only know that binding failed."""
        gone = self._units.gone(spec.domain, spec.service_class)
        return error if gone is None else LaunchFailed(f"{spec.name}: {gone}; {error}")

    async def _undo(self, unit: str, process: SystemdProcess | None) -> None:
        if process is None:
            await self._units.discard(unit)
            return
        process.kill()
        await process.removed()


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _check_cgroups(host: HostFs) -> None:
    """Raise Incompatible unless cgroup v2 alone is mounted, with what we need.

    Under v1 and hybrid systemd takes AllowedCPUs= and MemoryHigh= and does nothing with them.
    """
    text = host.read("sys/fs/cgroup/cgroup.controllers")
    if text is None:
        what = "is v1 or hybrid" if host.names("sys/fs/cgroup") else "is not mounted"
        raise Incompatible(
            f"cgroup v2 is needed, but sys/fs/cgroup {what}; "
            "boot with systemd.unified_cgroup_hierarchy=1"
        )
    missing = [name for name in _CONTROLLERS if name not in text.split()]
    if missing:
        raise Incompatible(
            f"cgroup v2 lacks the controllers {', '.join(missing)}; "
            "they may be disabled on the kernel's command line, or taken by cgroup v1"
        )
