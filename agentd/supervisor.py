"""Processes in motion: starts, watches, replaces and ends what the plan wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

import structlog

from agentd.core.supervision import (
    HOPELESS_EXIT,
    Action,
    CrashLoop,
    KillInstance,
    Start,
    StopInstance,
    Supervision,
    UnitKey,
)
from agentd.launch.protocol import ExitStatus, Launcher, LaunchSpec, Process
from corefleet.background import Background
from corefleet.clock import Clock
from corefleet.errors import LaunchFailed

STOP_GRACE_S = 5.0
PART_GRACE_S = 2.0
"""The kernel may need as long to end a process that it killed."""
_TICK_S = 0.5
_KILLED_S = 2.0

_log = structlog.get_logger(__name__)


class Household(Protocol):
    """What the supervisor asks of those who know workers and engines."""

    async def prepare(self, unit: UnitKey) -> None:
        """Do what takes time before `spec`; raises LaunchFailed."""

    def spec(self, unit: UnitKey, instance: str) -> LaunchSpec:
        """Return how to start an instance of `unit`."""

    def started(self, unit: UnitKey, instance: str, process: Process) -> None:
        """The process runs; make sure that `Supervisor.ready` is told when it can work."""

    def adopted(self, unit: UnitKey, instance: str, process: Process) -> None:
        """An earlier agentd's process runs; make sure as with `started`."""

    def stop(self, unit: UnitKey, instance: str, reason: str, grace_s: float) -> bool:
        """Ask it to end; False when it cannot be asked and SIGTERM must do."""

    def gone(self, unit: UnitKey, instance: str, reason: str) -> None:
        """The process is dead, or never came to life."""


class Supervisor:
    """Carries out what Supervision decides."""

    def __init__(
        self,
        core: Supervision,
        launcher: Launcher,
        household: Household,
        clock: Clock,
        background: Background,
    ) -> None:
        self._core = core
        self._launcher = launcher
        self._household = household
        self._clock = clock
        self._background = background
        self._processes: dict[str, Process] = {}
        self._wanted: Mapping[UnitKey, tuple[int, object]] = {}
        self._starting: set[str] = set()
        self._changed = asyncio.Event()
        self._closing = False
        self._alarm: asyncio.TimerHandle | None = None
        self._listeners: list[Callable[[], None]] = []
        self._attend: Callable[[Process], Awaitable[None]] | None = None
        self._ooms: dict[UnitKey, int] = {}
        self._failures: dict[UnitKey, int] = {}
        self._stuck: dict[str, str] = {}
        """Instances that are killed, with what to say of it instead of the signal, if anything."""

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a process became ready or ended."""
        self._listeners.append(listener)

    def adopt(self, processes: Sequence[Process]) -> None:
        """Take in what an earlier agentd started; call it before the first `want`."""
        for process in processes:
            spec = process.spec
            kind: Literal["engine", "worker"] = "engine" if spec.kind == "engine" else "worker"
            unit = UnitKey(kind, spec.unit, spec.domain)
            instance = _instance_of(process)
            self._core.adopt(instance, unit, spec.version, self._clock.monotonic())
            self._processes[instance] = process
            self._household.adopted(unit, instance, process)
            self._background.spawn(self._follow(unit, instance, process), f"process {instance}")

    def on_start(self, attend: Callable[[Process], Awaitable[None]]) -> None:
        """Await `attend` with each process that was started or adopted, before it is of use."""
        self._attend = attend

    def want(self, units: Mapping[UnitKey, tuple[int, object]]) -> None:
        """Set what should run; see Supervision.want."""
        self._wanted = units
        self._do(self._core.want(units, self._clock.monotonic()))
        self._tick()

    def ready(self, instance: str) -> None:
        """The process can work."""
        self._core.ready(instance, self._clock.monotonic())
        self._tell()

    def stuck(self, instance: str, reason: str) -> None:
        """The process does not answer: it is killed, and replaced."""
        process = self._processes.get(instance)
        if process is not None and instance not in self._stuck:
            self._stuck[instance] = ""
            self._background.spawn(self._give_up(instance, process, reason), f"stuck {instance}")

    async def _give_up(self, instance: str, process: Process, reason: str) -> None:
        if await process.throttled():
            # The kernel would kill it too, once it got so far.
            self._stuck[instance] = reason = f"out of memory, held back at its limit: {reason}"
        self._do(self._core.stuck(instance, reason))

    def parted(self, instance: str, reason: str) -> None:
        """The process cut its link: it is about to end, or it is killed in a moment.

        Killed at once it could not be told apart from one that the kernel had killed.
        """
        process = self._processes.get(instance)
        if process is not None:
            self._background.spawn(self._part(instance, process, reason), f"part {instance}")

    async def _part(self, instance: str, process: Process, reason: str) -> None:
        try:
            async with asyncio.timeout(PART_GRACE_S):
                await process.wait()
        except TimeoutError:
            self.stuck(instance, reason)

    def drain(self, process: Process, reason: str) -> None:
        """End the process politely, and start another in its place."""
        instance = _instance_of(process)
        self._do(self._core.drain(instance, reason, self._clock.monotonic()))

    async def settled(self) -> None:
        """Return when everything wanted is ready or known to fail."""
        while not self._core.settled():
            self._changed.clear()
            await self._changed.wait()

    def troubles(self) -> tuple[str, ...]:
        return self._core.troubles()

    def processes(self) -> tuple[Process, ...]:
        """Return all that run."""
        return tuple(self._processes.values())

    def out_of_memory(self) -> Mapping[UnitKey, int]:
        """Return how often processes of each unit ended for want of memory."""
        return dict(self._ooms)

    def failures(self) -> Mapping[UnitKey, int]:
        """Return how often each unit's processes ended unasked, or could not be started."""
        return dict(self._failures)

    def troubled(self, unit: UnitKey) -> bool:
        """Whether `unit` fails again and again."""
        return self._core.troubled(unit)

    def leave(self) -> None:
        """Watch no more and start nothing: the processes go on without this agentd."""
        self._closing = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def close(self) -> None:
        """Ask all processes to end, kill those that did not in time. Idempotent."""
        self._closing = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        # Workers first: what they finish may need an engine.
        engines = {key: want for key, want in self._wanted.items() if key.kind == "engine"}
        for units in (engines, {}):
            self._do(self._core.want(units, self._clock.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_GRACE_S + _KILLED_S):
                    while not self._only(units):
                        self._changed.clear()
                        await self._changed.wait()

    def _only(self, units: Mapping[UnitKey, object]) -> bool:
        """Whether nothing runs any more but what belongs to `units`."""
        alive = (*self._processes, *self._starting)
        return all(self._core.unit_of(instance) in units for instance in alive)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(instance=instance, unit=unit):
                    self._starting.add(instance)
                    self._background.spawn(self._live(unit, instance), f"process {instance}")
                case StopInstance(instance=instance, unit=unit, reason=reason):
                    self._stop(unit, instance, reason)
                case KillInstance(instance=instance, reason=reason):
                    process = self._processes.get(instance)
                    if process is not None:
                        _log.warning("Killing a process", process=instance, reason=reason)
                        process.kill()
                case CrashLoop():
                    _log.error(
                        "A process fails again and again",
                        kind=action.unit.kind,
                        name=action.unit.name,
                        domain=action.unit.domain,
                        failures=action.failures,
                        reason=action.reason,
                        again_in_s=round(action.again_in_s, 1),
                    )

    async def _live(self, unit: UnitKey, instance: str) -> None:
        """One process from its start to its end."""
        try:
            await self._household.prepare(unit)
            process = await self._launcher.start(self._household.spec(unit, instance))
        except LaunchFailed as error:
            _log.warning("Process not started", process=instance, reason=str(error))
            self._starting.discard(instance)
            self._failures[unit] = self._failures.get(unit, 0) + 1
            self._over(unit, instance, str(error), hopeless=False)
            return
        self._processes[instance] = process
        self._starting.discard(instance)
        self._household.started(unit, instance, process)
        if self._core.phase_of(instance) == "stopping":
            self._stop(unit, instance, "no longer wanted")
        await self._follow(unit, instance, process)

    async def _follow(self, unit: UnitKey, instance: str, process: Process) -> None:
        """One process from now to its end."""
        if self._attend is not None:
            await self._attend(process)
        status = await process.wait()
        del self._processes[instance]
        said = process.last_words() if status.code else ""
        starved = self._stuck.pop(instance, "")
        reason = starved or (f"{status}: {said}" if said else str(status))
        oom = status.oom or bool(starved)
        if oom:
            self._ooms[unit] = self._ooms.get(unit, 0) + 1
        if self._core.phase_of(instance) != "stopping":
            self._failures[unit] = self._failures.get(unit, 0) + 1
            _log.warning("Process ended", process=instance, pid=process.pid, reason=reason, oom=oom)
        self._over(unit, instance, reason, hopeless=status == ExitStatus(code=HOPELESS_EXIT))

    def _over(self, unit: UnitKey, instance: str, reason: str, hopeless: bool) -> None:
        actions = self._core.ended(instance, reason, self._clock.monotonic(), hopeless)
        self._household.gone(unit, instance, reason)
        if not self._closing:
            self._do(actions)
            self._tick()
        self._tell()

    def _stop(self, unit: UnitKey, instance: str, reason: str) -> None:
        process = self._processes.get(instance)
        if process is None:
            return
        if not self._household.stop(unit, instance, reason, STOP_GRACE_S):
            process.terminate()
        self._background.spawn(self._end(process), f"end {instance}")

    async def _end(self, process: Process) -> None:
        try:
            async with asyncio.timeout(STOP_GRACE_S + _KILLED_S / 2):
                await process.wait()
        except TimeoutError:
            process.kill()

    def _tick(self) -> None:
        """Start what has waited long enough, and look again when the next one is due."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._closing:
            return
        now = self._clock.monotonic()
        self._do(self._core.tick(now))
        due = self._core.next_start()
        pause = _TICK_S if due is None else min(_TICK_S, max(0.001, due - now))
        self._alarm = asyncio.get_running_loop().call_later(pause, self._tick)

    def _tell(self) -> None:
        self._changed.set()
        for listener in self._listeners:
            listener()


def _instance_of(process: Process) -> str:
    """Return the supervision's name of a process: its spec's name is told with its kind."""
    return process.name.removeprefix(f"{process.spec.kind} ")
