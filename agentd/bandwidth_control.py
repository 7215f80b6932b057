"""Memory bandwidth in motion: what is sensed goes to the regulator, what it says is done."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Literal

import msgspec
import structlog

from agentd.bandwidth.pipe import CanarySetup, DomainSetup, Setup, domain_setups
from agentd.bandwidth.report import Report
from agentd.bandwidth.resctrl import ResctrlDriver
from agentd.core.plan import Plan
from agentd.core.regulation import (
    Action,
    DomainState,
    LiftBatch,
    PressureElsewhere,
    RegulatorSettings,
    SensorDoubted,
    SetBatchShare,
)
from agentd.core.regulator import Regulator
from agentd.core.topology import Topology
from agentd.hostfs import HostFs
from agentd.launch.protocol import Launcher, Process
from agentd.sensing import Sensing
from corefleet.background import Background, stop
from corefleet.clock import Clock
from corefleet.config import BandwidthConfig, LogConfig
from corefleet.errors import CorefleetError, LaunchFailed, Unavailable
from corefleet.messages.wire import LoadVector

TICK_S = 1.0
CLASSES = ("batch", "online", "engine")

Actuator = Literal["resctrl", "cpu.max", "none"]

_log = structlog.get_logger(__name__)


class BandwidthControl:
    """Senses each domain's memory bandwidth and squeezes the batch class where it is short.

    The actuator is resctrl where it can limit bandwidth, else the batch slices' cpu.max where
    the launcher has slices, else nothing: then nothing is sensed either.
    """

    def __init__(
        self,
        config: BandwidthConfig,
        topology: Topology,
        launcher: Launcher,
        host: HostFs,
        clock: Clock,
        background: Background,
        log: LogConfig,
        node: str,
    ) -> None:
        self._config = config
        self._topology = topology
        self._launcher = launcher
        self._host = host
        self._clock = clock
        self._background = background
        self._regulator = Regulator(topology.domains, regulator_settings(config))
        self._driver: ResctrlDriver | None = None
        self._why_no_driver = ""
        self._wanted: dict[int, float | None] = {}
        self._applied: dict[int, float | None] = {}
        self._changed = asyncio.Event()
        self._batch_cpus: dict[int, int] = {}
        self._batch_in: frozenset[int] = frozenset()
        self._tasks: list[asyncio.Task[None]] = []
        peaks = {int(domain): peak for domain, peak in config.peak_bytes_per_s.items()}
        self._peaks = {domain: peak for domain, peak in peaks.items() if domain in topology.domains}
        self._setup = Setup(
            node=node,
            log=log,
            domains=(),
            interval_s=config.interval_s,
            canary=CanarySetup(every_s=config.canary_every_s),
            measure_peak=config.measure_peak,
        )
        self._sensing: Sensing | None = None

    @property
    def actuator(self) -> Actuator:
        """What limits batch."""
        if self._driver is not None:
            return "resctrl"
        return "cpu.max" if self._launcher.outlives else "none"

    @property
    def kind(self) -> Literal["resctrl", "software", "static"]:
        """Who limits bandwidth: the hardware, the regulator, or nobody who senses anything."""
        if self._driver is not None:
            return "resctrl"
        senses = self._launcher.outlives and self._config.sense != "off"
        return "software" if senses else "static"

    async def prepare(self) -> None:
        """Find the best actuator."""
        found = await asyncio.to_thread(ResctrlDriver.open, self._host, self._topology, CLASSES)
        if isinstance(found, str):
            self._why_no_driver = found
        else:
            found.set_peaks(self._peaks)
            self._driver = found

    async def start(self) -> None:
        """Begin to sense, and to limit batch."""
        if self.actuator == "none" or self._config.sense == "off":
            return
        setup = msgspec.structs.replace(self._setup, domains=await self._domains())
        self._sensing = Sensing(setup, self._take, self._background)
        await self._sensing.start()
        self._do(self._regulator.start(self._clock.monotonic()))
        self._tasks = [
            self._background.spawn(self._tick(), "bandwidth tick"),
            self._background.spawn(self._apply(), "bandwidth apply"),
        ]

    async def close(self) -> None:
        """Sense and change nothing any more. Idempotent.

        The last limits stay for processes that outlive agentd; else our groups are removed.
        """
        if self._sensing is not None:
            await self._sensing.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await stop(task)
        driver = self._driver
        if driver is not None and not self._launcher.outlives:
            self._driver = None
            for line in await asyncio.to_thread(driver.close):
                _log.warning("resctrl group not removed", reason=line)

    def planned(self, plan: Plan) -> None:
        """Take in which domains have batch workers, and on how many CPUs."""
        self._batch_in = frozenset(
            unit.domain for unit in plan.workers if unit.service_class == "batch"
        )
        cpus = {domain: len(found.worker_cpus) for domain, found in plan.domains.items()}
        if cpus != self._batch_cpus:
            self._batch_cpus = cpus
            self._applied.clear()
            self._changed.set()

    async def started(self, process: Process) -> None:
        """Put a new or adopted process into the resctrl group of its class."""
        if self._driver is None:
            return
        try:
            attached = await asyncio.to_thread(
                self._driver.attach, process.spec.service_class, partial(self._threads, process)
            )
        except Unavailable as error:
            _log.warning("Not in its resctrl group", process=process.name, reason=str(error))
        else:
            if not attached.settled:
                _log.warning("Threads still appear", process=process.name)

    async def verify(self, processes: tuple[Process, ...]) -> None:
        """Look whether groups and limits are still as they were set, and mend them."""
        driver = self._driver
        if driver is None:
            return
        for process in processes:
            threads = partial(self._threads, process)
            try:
                strays = await asyncio.to_thread(
                    driver.recheck, process.spec.service_class, threads
                )
            except Unavailable as error:
                _log.warning("resctrl not verified", process=process.name, reason=str(error))
                continue
            if strays:
                _log.warning("Back into its resctrl group", process=process.name, tids=strays)
        for line in await asyncio.to_thread(driver.verify):
            _log.warning("resctrl was changed", what=line)
            self._applied.clear()
            self._changed.set()

    @property
    def report(self) -> Report | None:
        """The newest report of the sensors."""
        return self._sensing.latest() if self._sensing is not None else None

    @property
    def domains(self) -> Mapping[int, DomainState]:
        """What the regulator knows, by domain."""
        return self._regulator.domains

    @property
    def sensed(self) -> LoadVector:
        """Return the newest report as a load, that of the domain which is worst off."""
        report = self.report
        if report is None:
            return LoadVector()
        loads = report.domains
        used = max((load.utilisation or 0.0 for load in loads), default=0.0)
        return LoadVector(
            memory_bandwidth=min(1.0, used),
            llc_hit=min((load.llc_hit for load in loads if load.llc_hit is not None), default=0.0),
            remote=max((load.remote_share or 0.0 for load in loads), default=0.0),
            steal=report.steal,
        )

    def lines(self) -> tuple[str, ...]:
        """Return what is active, and why not something better."""
        report = self.report
        if self.actuator == "none":
            sensed = "nothing limits batch: this launcher has no control groups"
        elif self._config.sense == "off":
            sensed = f"{self.actuator} could limit batch, but `bandwidth.sense` is off"
        else:
            source = report.source if report is not None else "nothing yet"
            sensed = f"batch is limited by {self.actuator}, sensed by {source}"
        lines = [f"memory bandwidth: {sensed}"]
        if self._why_no_driver:
            lines.append(f"memory bandwidth: not by resctrl: {self._why_no_driver}")
        notes = self._driver.notes if self._driver is not None else []
        lines += [f"memory bandwidth: {note}" for note in notes]
        if report is not None:
            lines += [f"memory bandwidth: {why}" for why in report.why_not]
        return tuple(lines)

    async def _domains(self) -> tuple[DomainSetup, ...]:
        """Return what is sensed, with the control groups whose cache misses can be counted."""
        groups: dict[int, tuple[str, ...]] = {}
        batch: dict[int, str] = {}
        try:
            for domain in self._topology.domains:
                found = await self._launcher.groups(domain)
                groups[domain] = tuple(found.values())
                if "batch" in found:
                    batch[domain] = found["batch"]
        except LaunchFailed as error:
            _log.warning("Control groups are not counted", reason=str(error))
        return domain_setups(self._topology, peaks=self._peaks, groups=groups, batch_groups=batch)

    def _take(self, report: Report) -> None:
        self._do(self._regulator.report(report, self._clock.monotonic(), self._batch_in))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._do(self._regulator.tick(self._clock.monotonic()))
            if self._applied != self._wanted:
                self._changed.set()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SetBatchShare(domain=domain, share=share):
                    self._wanted[domain] = share
                    self._changed.set()
                case LiftBatch(domain=domain):
                    self._wanted[domain] = None
                    self._changed.set()
                case SensorDoubted(domain=domain, source=source, reason=reason):
                    _log.warning("Sensor doubted", domain=domain, source=source, reason=reason)
                case PressureElsewhere(domain=domain, level=level):
                    _log.warning("Bandwidth is short, and not because of batch", domain=domain,
                                 level=round(level, 2))  # fmt: skip

    async def _apply(self) -> None:
        """Carry out the newest share of each domain; the tick repeats what failed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            for domain, share in list(self._wanted.items()):
                if domain in self._applied and self._applied[domain] == share:
                    continue
                try:
                    await self._limit(domain, share)
                except CorefleetError as error:
                    _log.warning("Batch not limited", domain=domain, reason=str(error))
                else:
                    self._applied[domain] = share

    async def _limit(self, domain: int, share: float | None) -> None:
        """Raises CorefleetError when the kernel or systemd refuses."""
        if self._driver is not None:
            await asyncio.to_thread(self._driver.set_share, "batch", domain, share)
            return
        cpus = self._batch_cpus.get(domain, 0)
        if not cpus:
            return
        await self._launcher.squeeze(domain, None if share is None else share * cpus)

    def _threads(self, process: Process) -> tuple[int, ...]:
        """Every thread of a process and of those it started."""
        group = self._host.read(f"proc/{process.pid}/cgroup") or ""
        path = next((line[3:] for line in group.splitlines() if line.startswith("0::/")), "")
        own = [int(name) for name in self._host.names(f"proc/{process.pid}/task")]
        listed = self._host.read(f"sys/fs/cgroup{path}/cgroup.threads") if len(path) > 1 else None
        return (*own, *(int(tid) for tid in (listed or "").split() if int(tid) not in own))


def regulator_settings(config: BandwidthConfig) -> RegulatorSettings:
    """Return the law's settings; raises InvalidInput naming the key."""
    return RegulatorSettings(
        high=config.high,
        low=config.low,
        far_below=config.far_below,
        canary_at_high=config.canary_at_high,
        pressure_at_high=config.pressure_at_high,
        floor=config.floor,
        static_batch_share=config.static_batch_share,
    )
