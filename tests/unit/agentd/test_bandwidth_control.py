"""What the regulator says is carried out, again if need be, and told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from agentd.bandwidth_control import BandwidthControl
from agentd.core.plan import make_plan
from agentd.core.topology import Overrides, Topology
from agentd.hostfs import HostFs
from agentd.launch.protocol import Launcher, ServiceClass
from agentd.probes import discover
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.config import BandwidthConfig, LogConfig
from corefleet.errors import LaunchFailed
from corefleet.messages.records import PoolSpec

BATCH = PoolSpec(name="b", agent="m:A", pool_class="batch")


class Squeezed:
    """A launcher that notes what batch is given; `refusals`: so many times it cannot."""

    unisolated = ()

    def __init__(self, outlives: bool = True, refusals: int = 0) -> None:
        self.outlives = outlives
        self.refusals = refusals
        self.given: list[tuple[int, float | None]] = []
        self.changed = asyncio.Event()

    async def groups(self, domain: int) -> dict[ServiceClass, str]:
        if self.refusals:
            raise LaunchFailed("systemd does not answer")
        return {"batch": f"sys/fs/cgroup/b{domain}", "online": f"sys/fs/cgroup/o{domain}"}

    async def squeeze(self, domain: int, cpus: float | None) -> None:
        if self.refusals:
            self.refusals -= 1
            raise LaunchFailed("systemd does not answer")
        self.given.append((domain, cpus))
        self.changed.set()


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    errors: list[BaseException] = []
    made = Background(errors.append)
    yield made
    await made.close()
    assert not errors


def control(
    launcher: Squeezed, background: Background, config: BandwidthConfig | None = None
) -> tuple[BandwidthControl, Topology]:
    topology = discover(HostFs(), Overrides())
    made = BandwidthControl(
        config or BandwidthConfig(interval_s=0.1),
        topology,
        cast(Launcher, launcher),
        HostFs(),
        SystemClock(),
        background,
        LogConfig(),
        "n1",
    )
    return made, topology


async def test_batch_starts_with_the_static_cap_and_a_refusal_is_repeated(
    background: Background,
) -> None:
    launcher = Squeezed(refusals=1)
    made, topology = control(launcher, background)
    await made.prepare()
    plan = make_plan(topology, (BATCH,), (), {}, serves_models=False)
    made.planned(plan)
    await made.start()
    try:
        async with asyncio.timeout(20):
            await launcher.changed.wait()
    finally:
        await made.close()
    domain, cpus = launcher.given[0]
    assert cpus == pytest.approx(0.25 * len(plan.domains[domain].worker_cpus))
    assert made.actuator == "cpu.max"
    assert made.kind == "software"


async def test_a_launcher_without_groups_is_not_asked_and_nothing_is_sensed(
    background: Background,
) -> None:
    launcher = Squeezed(outlives=False)
    made, _ = control(launcher, background)
    await made.prepare()
    await made.start()
    assert (made.actuator, made.kind, made.report) == ("none", "static", None)
    assert "nothing limits batch" in made.lines()[0]
    assert any("not by resctrl" in line for line in made.lines())
    assert made.sensed.memory_bandwidth == 0.0
    await made.close()
    assert launcher.given == []


async def test_what_is_switched_off_is_said(background: Background) -> None:
    made, _ = control(Squeezed(), background, BandwidthConfig(sense="off"))
    await made.prepare()
    await made.start()
    assert made.kind == "static"
    assert "`bandwidth.sense` is off" in made.lines()[0]
    await made.close()
