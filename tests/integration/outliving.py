"""`python -m tests.integration.outliving agentd.toml`: an agentd whose processes outlive it.

Its launcher stands in for systemd's on machines without it: detached processes, kept by pid.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from agentd.app import run
from agentd.core.topology import Overrides, Topology
from agentd.hostfs import HostFs
from agentd.launch.kept import KeptSpecs
from agentd.launch.protocol import ExitStatus, LaunchSpec, ServiceClass
from agentd.probes import discover
from agentd.rooms import Rooms
from corefleet import config as configuration
from corefleet import event_loop, logs
from corefleet.config import AgentdConfig


class DetachedProcess:
    """A process that is no child of ours, seen through its pidfd."""

    def __init__(self, spec: LaunchSpec, pid: int, pidfd: int) -> None:
        self.spec = spec
        self.name = spec.name
        self.pid = pid
        self._pidfd = pidfd
        self._ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(pidfd, self._over)

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._ended)

    def last_words(self) -> str:
        return ""

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def drift(self) -> str | None:
        return None

    async def throttled(self) -> bool:
        return False

    async def rebind(self) -> None:
        return

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.done():
            signal.pidfd_send_signal(self._pidfd, number)

    def _over(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(ExitStatus(lost=True))


class OutlivingLauncher:
    """Starts sessions of their own and finds them again."""

    unisolated = ("nothing is bound: a test's launcher",)
    outlives = True

    def __init__(self, directory: Path) -> None:
        self._kept = KeptSpecs(directory)

    async def start(self, spec: LaunchSpec) -> DetachedProcess:
        # Reaped by nobody while agentd lives and by init afterwards: a zombie ends its pidfd.
        popen = subprocess.Popen(  # noqa: ASYNC220
            spec.command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        popen.returncode = 0  # no child of this object any more
        self._kept.keep(str(popen.pid), spec)
        return DetachedProcess(spec, popen.pid, os.pidfd_open(popen.pid))

    async def adopt(self) -> tuple[DetachedProcess, ...]:
        found = []
        for unit in self._kept.units():
            spec = self._kept.read(unit)
            try:
                pidfd = os.pidfd_open(int(unit))
            except ProcessLookupError:
                self._kept.forget(unit)
                continue
            if HostFs().command_line(int(unit)) == spec.command:
                found.append(DetachedProcess(spec, int(unit), pidfd))
            else:
                os.close(pidfd)
        return tuple(found)

    async def squeeze(self, domain: int, cpus: float | None) -> None:
        return

    async def groups(self, domain: int) -> dict[ServiceClass, str]:
        return {}

    async def close(self) -> None:
        return


async def find(config: AgentdConfig, topology: Topology, rooms: Rooms) -> OutlivingLauncher:
    return OutlivingLauncher(rooms.kept / "units")


def main(path: str) -> None:
    config = configuration.load(Path(path), AgentdConfig)
    logs.configure(config.log, "agentd", node=config.node_id)
    with event_loop.runner() as runner:
        runner.run(run(config, discover(HostFs(), Overrides()), 30.0, find))


if __name__ == "__main__":
    main(sys.argv[1])
