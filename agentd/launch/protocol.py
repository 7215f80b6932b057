"""What every launcher can do."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

ServiceClass = Literal["engine", "online", "batch"]
"""Whose CPUs and bandwidth are squeezed first: `batch`, never `engine`."""
SERVICE_CLASSES: tuple[ServiceClass, ...] = ("engine", "online", "batch")


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process to start, bound to `cpus` and to the memory of `nodes`.

    A launcher whose processes outlive agentd keeps the spec (as JSON) beside the process and
    gives it back on adoption: `unit` and `version` are the supervisor's, not the launcher's.
    """

    name: str
    """Unique among all processes that ever ran on this node."""
    command: tuple[str, ...]
    cpus: tuple[int, ...]
    domain: int
    memory_nodes: tuple[int, ...] = ()
    """Nodes that its memory comes from; (): its domain's."""
    service_class: ServiceClass = "online"
    kind: str = "worker"
    """`worker`, `engine` or another program of ours; names its unit and its log lines."""
    pool: str = ""
    unit: str = ""
    """What it is an instance of: a pool or a model."""
    version: str = ""
    """Digest of what it was started with: another version is not adopted."""
    memory_high: int = 0
    """Bytes beyond which it is throttled and reclaimed from; 0: no limit."""
    memory_max: int = 0
    """Bytes beyond which the kernel kills it; 0: no limit."""
    tasks_max: int = 0
    """Processes and threads that it may have; 0: no limit."""
    cpu_weight: int = 100
    """Share of CPU time against others on the same CPUs, 1 to 10000."""
    environment: Mapping[str, str] = {}
    """Added to what the launcher gives."""
    log: Path | None = None
    """Takes its stdout and stderr where there is no journal; None: agentd's stderr."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that its memory comes from."""
        return self.memory_nodes or (self.domain,)


class ExitStatus(msgspec.Struct, frozen=True):
    """How a process ended: `code`, or the number of the `signal` that killed it."""

    code: int | None = None
    signal: int | None = None
    oom: bool = False
    """The kernel killed it because its memory limit or its domain was full."""
    lost: bool = False
    """It ended while nobody watched, and nothing says how."""

    def __str__(self) -> str:
        if self.oom:
            return "killed by the kernel: out of memory"
        if self.lost:
            return "ended unseen"
        if self.signal is not None:
            try:
                return f"killed by {signal.Signals(self.signal).name}"
            except ValueError:
                return f"killed by signal {self.signal}"
        return f"exit code {self.code}"


class Process(Protocol):
    """A started or adopted process, verified to be bound."""

    @property
    def pid(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> LaunchSpec: ...

    async def wait(self) -> ExitStatus:
        """Return how it ended, as soon as it has. May be awaited by several."""

    def last_words(self) -> str:
        """Return the last line that it wrote to its log, '' without one."""

    def terminate(self) -> None:
        """Ask it to end (SIGTERM). No matter if it has."""

    def kill(self) -> None:
        """End it and what it started (SIGKILL). No matter if it has ended."""

    async def drift(self) -> str | None:
        """Return what is wrong with its binding and limits now, None if nothing is.

        None too for a process that has ended: `wait` tells of that.
        """

    async def throttled(self) -> bool:
        """Return whether its memory is at `memory_high`: the kernel holds it back then.

        Between there and `memory_max` each page may cost it up to two seconds
        (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files).
        """

    async def rebind(self) -> None:
        """Bind it again as its spec says; call `drift` to see whether that worked.

        Raises LaunchFailed when the kernel or systemd refuses, e.g. a CPU is offline.
        """


class Launcher(Protocol):
    async def start(self, spec: LaunchSpec) -> Process:
        """Start a process and return it once it is the command, bound as asked.

        Raises LaunchFailed naming the process and what went wrong; nothing is left of it.
        """

    async def adopt(self) -> tuple[Process, ...]:
        """Return the processes of an earlier agentd that still run; call it once, before `start`.

        Those whose kept spec cannot be read are ended and reported in the log.
        """

    async def squeeze(self, domain: int, cpus: float | None) -> None:
        """Let the batch class of `domain` use so many CPUs' worth of time; None: all.

        Raises LaunchFailed when this launcher cannot (see `unisolated`).
        """

    async def groups(self, domain: int) -> dict[ServiceClass, str]:
        """Return the control group of each class in `domain`, below the kernel's root.

        They are there from then on. {}: this launcher has none. Raises LaunchFailed.
        """

    async def close(self) -> None:
        """Release what the launcher holds; processes that outlive agentd go on. Idempotent."""

    @property
    def outlives(self) -> bool:
        """Whether its processes outlive agentd and are adopted by the next one."""

    @property
    def unisolated(self) -> tuple[str, ...]:
        """Return one line for each isolation that this launcher cannot give here."""
