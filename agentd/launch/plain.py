"""The plain launcher: numactl and process groups, for machines without systemd.

Its processes die with agentd: `setpriv --pdeathsig` where util-linux has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import structlog

from agentd.core.cpulist import format_list
from agentd.hostfs import HostFs
from agentd.launch.binder import Binder, becomes_command, bind_threads, find_binder
from agentd.launch.mortal import die_with_parent
from agentd.launch.protocol import ExitStatus, LaunchSpec, ServiceClass
from agentd.launch.verify import wrong_binding
from corefleet.errors import Incompatible, LaunchFailed

_EXEC_S = 5.0
_TRIAL_S = 5.0
_LAST_WORDS_BYTES = 4096

_log = structlog.get_logger(__name__)


class PlainProcess:
    """A child of agentd in a process group of its own, watched through its pidfd."""

    def __init__(
        self, spec: LaunchSpec, popen: subprocess.Popen[bytes], host: HostFs, memory: bool
    ) -> None:
        self.spec = spec
        self._host = host
        self._memory = memory
        self._popen = popen
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def name(self) -> str:
        return self.spec.name

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._ended)

    def last_words(self) -> str:
        if self.spec.log is None:
            return ""
        with self.spec.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def terminate(self) -> None:
        if not self._ended.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        # The leader is not reaped before `_ended`, so the group's number is still its own.
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def drift(self) -> str | None:
        if self._ended.done():
            return None
        spec = self.spec
        # A large process has a long numa_maps.
        wrong = await asyncio.to_thread(
            wrong_binding, self._host, self.pid, spec.cpus, spec.nodes, self._memory
        )
        return None if self._ended.done() else wrong

    async def throttled(self) -> bool:
        return False

    async def rebind(self) -> None:
        bind_threads(self._host, self.pid, self.spec)

    def _reap(self) -> None:
        # What it started must not outlive it; the zombie still holds the group's number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._popen.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = ExitStatus(signal=-code) if code < 0 else ExitStatus(code=code)
        if not self._ended.done():
            self._ended.set_result(status)


class PlainLauncher:
    """Starts processes with numactl. Made by `find`."""

    def __init__(self, host: HostFs, binder: Binder, unisolated: tuple[str, ...]) -> None:
        self._host = host
        self._binder = binder
        self._mortal = die_with_parent()
        self.unisolated = unisolated

    @classmethod
    async def find(
        cls, host: HostFs, cpus: Sequence[int], domain: int, require_numa: bool
    ) -> PlainLauncher:
        """Return a launcher for this machine, after one trial run on `cpus` and `domain`.

        Where the kernel has no NUMA support memory is not bound, and `unisolated` says so.
        Raises Incompatible when numactl is missing, or when `require_numa` cannot be met.
        """
        binder = find_binder(memory=True)
        refusal = await _try(binder.command(cpus, (domain,)))
        if refusal is None:
            return cls(host, binder, ())
        line = f"memory is not bound to its domain: numactl says: {refusal}"
        if require_numa:
            raise Incompatible(f"`require` has numa-binding, but {line}")
        binder = find_binder(memory=False)
        refusal = await _try(binder.command(cpus, (domain,)))
        if refusal is not None:
            raise Incompatible(f"CPUs {format_list(cpus)} cannot be bound: {refusal}")
        return cls(host, binder, (line,))

    async def start(self, spec: LaunchSpec) -> PlainProcess:
        binder = self._binder.command(spec.cpus, spec.nodes)
        command = (*self._mortal, *_environment(spec), *binder, *spec.command)
        with _output(spec) as output:
            try:
                # Not from a thread: the parent that PR_SET_PDEATHSIG watches is the thread.
                popen = subprocess.Popen(  # noqa: ASYNC220 - vfork: back within 2 ms
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )
            except OSError as error:
                raise LaunchFailed(f"{spec.name}: {command[0]}: {error}") from error
        process = PlainProcess(spec, popen, self._host, self._binder.memory)
        try:
            await becomes_command(self._host, process, spec.command, _EXEC_S)
            wrong = await process.drift()
            if wrong is not None:
                raise LaunchFailed(f"{spec.name}: not bound: {wrong}")
        except BaseException:  # whatever ended this, an unbound process must not go on
            process.kill()
            await process.wait()
            raise
        return process

    async def adopt(self) -> tuple[PlainProcess, ...]:
        return ()

    async def squeeze(self, domain: int, cpus: float | None) -> None:
        if cpus is not None:
            raise LaunchFailed(f"domain {domain}: batch cannot be squeezed: no cgroup to write to")

    async def groups(self, domain: int) -> dict[ServiceClass, str]:
        return {}

    async def close(self) -> None:
        return

    @property
    def outlives(self) -> bool:
        return False


def _environment(spec: LaunchSpec) -> tuple[str, ...]:
    """Return what adds to the inherited environment; env(1) execs."""
    added = (f"{name}={value}" for name, value in spec.environment.items())
    return ("env", *added) if spec.environment else ()


def _output(spec: LaunchSpec) -> IO[bytes]:
    if spec.log is None:
        return open(os.dup(sys.stderr.fileno()), "wb", buffering=0)
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    return spec.log.open("ab", buffering=0)


async def _try(prefix: Sequence[str]) -> str | None:
    """Run `true` behind `prefix`; return what it says when that fails."""
    process = await asyncio.create_subprocess_exec(
        *prefix,
        "true",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_TRIAL_S):
            _, said = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"no answer from {prefix[0]} within {_TRIAL_S} s"
    if process.returncode == 0:
        return None
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[0] if lines else f"exit code {process.returncode}"
