"""What the launchers' contract is held by: plain, systemd, and systemd as a script."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from agentd.core.topology import Domain, Overrides
from agentd.hostfs import HostFs
from agentd.launch import Deadlines, Launcher, PlainLauncher, SystemdLauncher, SystemdSettings
from agentd.launch.protocol import LaunchSpec
from agentd.probes import discover
from corefleet.errors import Incompatible
from tests.unit.agentd.launch.scripted_systemd import PrivateBus, ScriptedSystemd

TOPOLOGY = discover(HostFs(), Overrides())


def _last_domain() -> Domain:
    """Return the last domain, with another's CPU if it has but one: a binding can be narrowed."""
    *others, last = sorted(TOPOLOGY.domains.values(), key=lambda domain: domain.domain)
    if len(last.cpus) == 1 and others:
        return replace(last, cpus=tuple(sorted((others[-1].cpus[-1], *last.cpus))))
    return last


DOMAIN = _last_domain()
PATIENCE_S = 60.0
"""An emulated machine is ten times slower than a real one."""

MODELS = "models"
"""Where replicas would lie in a test's directory."""

_SLOW = Deadlines(call_s=30.0, job_s=60.0, verdict_s=20.0, applied_s=20.0)


class Backend(Protocol):
    """A machine with a launcher, and what a test may see of it."""

    async def launcher(self) -> Launcher:
        """A launcher of its own: another agentd on the same node."""

    async def left(self) -> list[str]:
        """Return the units that are still there."""


class PlainBackend:
    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def launcher(self) -> Launcher:
        launcher = await PlainLauncher.find(HostFs(), DOMAIN.cpus, DOMAIN.domain, False)
        self._stack.push_async_callback(launcher.close)
        return launcher

    async def left(self) -> list[str]:
        return []


class ScriptedBackend:
    """The systemd launcher against a scripted manager on a bus of its own."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._bus = PrivateBus(directory)
        self.systemd = ScriptedSystemd(directory / "tree")
        self._started = False

    async def launcher(self) -> Launcher:
        if not self._started:
            await self._bus.start()
            self._stack.push_async_callback(self._bus.stop)
            await self.systemd.connect(self._bus.address)
            self._stack.push_async_callback(self.systemd.close)
            self._started = True
        launcher = await SystemdLauncher.find(
            self.systemd.host(),
            self._directory / "units",
            settings("cfscript", self._directory),
            self._bus.address,
            _SLOW,
        )
        self._stack.push_async_callback(launcher.close)
        return launcher

    async def left(self) -> list[str]:
        return self.systemd.services()


class SystemdBackend:
    """The machine's own systemd; skipped by name where there is none that can be used."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._prefix = f"cftest{secrets.token_hex(3)}"
        self._launchers: list[SystemdLauncher] = []

    async def launcher(self) -> Launcher:
        try:
            launcher = await SystemdLauncher.find(
                HostFs(),
                self._directory / "units",
                settings(self._prefix, self._directory),
                None,
                _SLOW,
            )
        except Incompatible as error:
            pytest.skip(f"no systemd with cgroup v2 here: {error}")
        self._stack.push_async_callback(launcher.close)
        if not self._launchers:
            self._stack.push_async_callback(self._stop_slices)
        self._launchers.append(launcher)
        return launcher

    async def left(self) -> list[str]:
        return list(await self._launchers[-1]._units.loaded())

    async def _stop_slices(self) -> None:
        launcher = await SystemdLauncher.find(
            HostFs(),
            self._directory / "units",
            settings(self._prefix, self._directory),
            None,
            _SLOW,
        )
        await launcher._systemd.stop(f"{self._prefix}.slice", 60.0)
        await launcher.close()


BACKENDS: dict[str, Callable[[Path, AsyncExitStack], Backend]] = {
    "plain": PlainBackend,
    "scripted": ScriptedBackend,
    "systemd": SystemdBackend,
}


def settings(prefix: str, directory: Path) -> SystemdSettings:
    """Settings under which processes see `directory`, where tests put their files."""
    return SystemdSettings(
        node="contract-node",
        cpus={
            number: domain.cpus
            for number, domain in {**TOPOLOGY.domains, DOMAIN.domain: DOMAIN}.items()
        },
        batch_cpus={},
        numa=TOPOLOGY.numa,
        prefix=prefix,
        writable=(directory,),
        models=directory / MODELS,
        stop_timeout_s=5.0,
    )


def spec(*command: str, **changes: object) -> LaunchSpec:
    """A spec of domain `DOMAIN` and its last CPU."""
    values: dict[str, object] = {
        "name": f"it-{secrets.token_hex(3)}",
        "command": command,
        "cpus": DOMAIN.cpus[-1:],
        "domain": DOMAIN.domain,
        "pool": "pool",
        "unit": "unit",
    }
    return LaunchSpec(**{**values, **changes})  # type: ignore[arg-type]
