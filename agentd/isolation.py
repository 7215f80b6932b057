"""What keeps workloads apart on this node: bindings verified, bandwidth regulated, and told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from agentd.bandwidth_control import BandwidthControl
from agentd.binding_watch import BindingWatch
from agentd.core.plan import Plan
from agentd.core.topology import Topology
from agentd.hostfs import HostFs
from agentd.launch.protocol import Launcher
from agentd.supervisor import Supervisor
from corefleet.background import Background
from corefleet.clock import Clock
from corefleet.config import AgentdConfig
from corefleet.messages.wire import LoadVector


class Place(Protocol):
    """Where this is: see daemon.Surroundings."""

    @property
    def config(self) -> AgentdConfig: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def launcher(self) -> Launcher: ...
    @property
    def host(self) -> HostFs: ...


class Isolation:
    """Bandwidth and bindings of one node's processes.

    `look_again` is awaited before each round of verification: it sees CPUs that came or went.
    """

    def __init__(
        self,
        here: Place,
        supervisor: Supervisor,
        look_again: Callable[[], Awaitable[None]],
        clock: Clock,
        background: Background,
    ) -> None:
        config = here.config
        self._launcher = here.launcher
        self._supervisor = supervisor
        self._look_again = look_again
        self.bandwidth = BandwidthControl(
            config.bandwidth,
            here.topology,
            here.launcher,
            here.host,
            clock,
            background,
            config.log,
            config.node_id,
        )
        self.binding = BindingWatch(supervisor, self._before_round, background)

    async def prepare(self) -> None:
        """Find out what can limit bandwidth; processes may start then."""
        await self.bandwidth.prepare()
        self._supervisor.on_start(self.bandwidth.started)

    async def start(self) -> None:
        """Begin to sense, regulate and verify."""
        await self.bandwidth.start()
        self.binding.start()

    async def close(self) -> None:
        """Change nothing any more. Idempotent."""
        await self.binding.close()
        await self.bandwidth.close()

    def planned(self, plan: Plan) -> None:
        """Take a new plan in."""
        self.bandwidth.planned(plan)

    @property
    def sensed(self) -> LoadVector:
        """What the sensors say of the node's memory, for its heartbeat."""
        return self.bandwidth.sensed

    def lines(self) -> tuple[str, ...]:
        """Return one line for each kind of isolation: what is active, and why not better."""
        unisolated = self._launcher.unisolated
        kind = "systemd units" if self._launcher.outlives else "plain processes"
        bindings = self.binding.bindings
        lines = [f"launcher: {kind}", *unisolated]
        if bindings.repaired or bindings.drained:
            lines.append(f"bindings: {bindings.repaired} bound again, {bindings.drained} drained")
        return (*lines, *bindings.lines(), *self.bandwidth.lines())

    async def _before_round(self) -> None:
        await self._look_again()
        await self.bandwidth.verify(self._supervisor.processes())
