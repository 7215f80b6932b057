"""The program that binds before it execs the command, and when it has done so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from agentd.core.cpulist import format_list
from agentd.hostfs import HostFs
from agentd.launch.protocol import LaunchSpec, Process
from corefleet.errors import Incompatible, LaunchFailed

_LOOK_EVERY_S = 0.002


@dataclass(slots=True, frozen=True)
class Binder:
    """How processes are bound here; `memory`: their memory too."""

    program: str
    memory: bool

    def command(self, cpus: Sequence[int], nodes: Sequence[int]) -> tuple[str, ...]:
        """Return what goes before a command. A cpuset must allow `cpus` already."""
        where = format_list(cpus)
        if self.memory:
            return (self.program, f"--physcpubind={where}", f"--membind={format_list(nodes)}")
        return (self.program, "-c", where)


def find_binder(memory: bool) -> Binder:
    """Return numactl, or taskset where memory cannot be bound.

    Raises Incompatible naming the package that is missing.
    """
    name, package = ("numactl", "numactl") if memory else ("taskset", "util-linux")
    program = shutil.which(name)
    if program is None:
        raise Incompatible(f"{name} is not on PATH; install the package {package}")
    return Binder(program, memory)


async def becomes_command(
    host: HostFs, process: Process, command: tuple[str, ...], within_s: float
) -> None:
    """Wait until what binds has done its work and exec'd the command.

    Raises LaunchFailed when it ended first, or took longer than `within_s`.
    """
    ended = asyncio.ensure_future(process.wait())
    try:
        async with asyncio.timeout(within_s):
            while not ended.done():
                if _is_command(host.command_line(process.pid), command):
                    return
                await asyncio.wait((ended,), timeout=_LOOK_EVERY_S)
    except TimeoutError:
        raise LaunchFailed(f"{process.name}: not started after {within_s} s") from None
    finally:
        ended.cancel()
    said = process.last_words()
    status = await process.wait()
    raise LaunchFailed(f"{process.name}: ended at once: {status}{f': {said}' if said else ''}")


def bind_threads(host: HostFs, pid: int, spec: LaunchSpec) -> None:
    """Bind every thread of a process again; raises LaunchFailed when the kernel refuses."""
    try:
        for thread in host.names(f"proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), spec.cpus)
    except OSError as error:
        cpus = format_list(spec.cpus)
        raise LaunchFailed(f"{spec.name}: cannot be bound to CPUs {cpus}: {error}") from error


def _is_command(line: tuple[str, ...] | None, command: tuple[str, ...]) -> bool:
    """Whether a process runs `command` itself; a script's interpreter may stand before it."""
    return line is not None and line[-len(command) :] == command and len(line) <= len(command) + 1
