"""The supervisor with processes that a test ends as it likes."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator

import pytest

from agentd import supervisor as supervisor_module
from agentd.core.supervision import CRASH_LOOP, HOPELESS_EXIT, Supervision, UnitKey
from agentd.launch.protocol import ExitStatus, LaunchSpec, Process, ServiceClass
from agentd.supervisor import Supervisor
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.errors import LaunchFailed

WORKER = UnitKey("worker", "pool", 0)
ENGINE = UnitKey("engine", "model", 0)


class FakeProcess:
    def __init__(self, spec: LaunchSpec, pid: int) -> None:
        self.spec = spec
        self.name = spec.name
        self.pid = pid
        self.asked = False
        self.stubborn = False
        self.full = False
        self._over: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._over)

    def last_words(self) -> str:
        return "last words"

    def end(self, status: ExitStatus) -> None:
        if not self._over.done():
            self._over.set_result(status)

    def terminate(self) -> None:
        self.asked = True
        if not self.stubborn:
            self.end(ExitStatus(code=0))

    def kill(self) -> None:
        self.end(ExitStatus(signal=9))

    async def drift(self) -> str | None:
        return None

    async def throttled(self) -> bool:
        return self.full

    async def rebind(self) -> None:
        return


class House:
    """Launcher and household: notes what it is told, and readies what it starts."""

    def __init__(self) -> None:
        self.processes: dict[str, FakeProcess] = {}
        self.ended: list[tuple[str, str]] = []
        self.stopped: list[str] = []
        self.failing = 0
        self.changed = asyncio.Event()
        self.unisolated = ()
        self.supervisor: Supervisor | None = None
        self._pids = itertools.count(1)

    async def start(self, spec: LaunchSpec) -> Process:
        if self.failing:
            self.failing -= 1
            raise LaunchFailed(f"{spec.name}: not bound")
        process = self.processes[spec.name] = FakeProcess(spec, next(self._pids))
        return process

    async def adopt(self) -> tuple[Process, ...]:
        return ()

    async def squeeze(self, domain: int, cpus: float | None) -> None:
        return

    async def groups(self, domain: int) -> dict[ServiceClass, str]:
        return {}

    async def close(self) -> None:
        return

    outlives = False

    def adopted(self, unit: UnitKey, instance: str, process: Process) -> None:
        self.started(unit, instance, process)

    async def prepare(self, unit: UnitKey) -> None:
        return

    def spec(self, unit: UnitKey, instance: str) -> LaunchSpec:
        return LaunchSpec(name=instance, command=("true",), cpus=(0,), domain=0)

    def started(self, unit: UnitKey, instance: str, process: Process) -> None:
        assert self.supervisor is not None
        self.supervisor.ready(instance)
        self.changed.set()

    def stop(self, unit: UnitKey, instance: str, reason: str, grace_s: float) -> bool:
        self.stopped.append(instance)
        if unit.kind == "engine":
            return False
        self.processes[instance].end(ExitStatus(code=0))
        return True

    def gone(self, unit: UnitKey, instance: str, reason: str) -> None:
        self.ended.append((instance, reason))
        self.changed.set()

    async def until(self, count: int) -> list[str]:
        """Return the names of all ever started once there are `count`."""
        async with asyncio.timeout(10):
            while len(self.processes) < count:
                self.changed.clear()
                await self.changed.wait()
        return list(self.processes)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    errors: list[BaseException] = []
    background = Background(errors.append)
    core = Supervision(random.Random(0))
    house.supervisor = Supervisor(core, house, house, SystemClock(), background)
    yield house
    await house.supervisor.close()
    await background.close()
    assert not errors


def supervisor(house: House) -> Supervisor:
    assert house.supervisor is not None
    return house.supervisor


async def test_a_dead_process_is_told_and_replaced(house: House) -> None:
    supervisor(house).want({WORKER: (2, "v1")})
    await supervisor(house).settled()
    first, second = await house.until(2)
    house.processes[first].end(ExitStatus(signal=11))
    third = (await house.until(3))[2]
    assert house.ended == [(first, "killed by SIGSEGV")]
    assert third not in {first, second}
    assert supervisor(house).failures() == {WORKER: 1}


async def test_a_start_that_fails_is_tried_again(house: House) -> None:
    house.failing = 2
    supervisor(house).want({WORKER: (1, "v1")})
    await house.until(1)
    await supervisor(house).settled()
    assert [reason for _, reason in house.ended] == [
        f"{name}: not bound" for name, _ in house.ended
    ]
    assert len(house.ended) == 2
    assert supervisor(house).failures() == {WORKER: 2}


async def test_a_unit_that_fails_and_fails_counts_as_settled_and_is_named(house: House) -> None:
    house.failing = CRASH_LOOP
    supervisor(house).want({WORKER: (1, "v1")})
    await supervisor(house).settled()
    assert supervisor(house).troubled(WORKER)
    assert "not bound" in supervisor(house).troubles()[0]


async def test_an_engine_whose_model_is_unusable_is_in_trouble_at_once(house: House) -> None:
    supervisor(house).want({ENGINE: (1, "v1")})
    (engine,) = await house.until(1)
    house.processes[engine].end(ExitStatus(code=HOPELESS_EXIT))
    async with asyncio.timeout(5):
        while not supervisor(house).troubled(ENGINE):
            house.changed.clear()
            await house.changed.wait()
    assert "exit code 3: last words" in supervisor(house).troubles()[0]


async def test_a_stuck_process_is_killed_and_replaced(house: House) -> None:
    supervisor(house).want({WORKER: (1, "v1")})
    (worker,) = await house.until(1)
    supervisor(house).stuck(worker, "silent")
    await house.until(2)
    assert house.ended == [(worker, "killed by SIGKILL")]


async def test_a_process_held_back_for_its_memory_is_told_as_out_of_memory(house: House) -> None:
    supervisor(house).want({WORKER: (1, "v1")})
    (worker,) = await house.until(1)
    house.processes[worker].full = True
    for _ in range(2):
        supervisor(house).stuck(worker, "silent for 20 s")
    await house.until(2)
    assert house.ended == [(worker, "out of memory, held back at its limit: silent for 20 s")]
    assert supervisor(house).out_of_memory() == {WORKER: 1}


async def test_closing_ends_workers_before_engines(house: House) -> None:
    supervisor(house).want({ENGINE: (1, "v1"), WORKER: (1, "v1")})
    await supervisor(house).settled()
    engine, worker = await house.until(2)
    await supervisor(house).close()
    assert [name for name, _ in house.ended] == [worker, engine]
    assert house.processes[engine].asked
    assert not house.processes[worker].asked


async def test_who_does_not_end_when_asked_is_killed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentd.supervisor.STOP_GRACE_S", 0.05)
    monkeypatch.setattr("agentd.supervisor._KILLED_S", 0.1)
    supervisor(house).want({ENGINE: (1, "v1")})
    (engine,) = await house.until(1)
    house.processes[engine].stubborn = True
    await supervisor(house).close()
    assert house.ended == [(engine, "killed by SIGKILL")]


async def test_a_process_that_cut_its_link_tells_itself_how_it_ended(house: House) -> None:
    supervisor(house).want({WORKER: (1, "v1")})
    (name,) = await house.until(1)
    supervisor(house).parted(name, "its link ended")
    house.processes[name].end(ExitStatus(signal=9, oom=True))
    await house.until(2)
    assert house.ended == [(name, "killed by the kernel: out of memory")]
    assert supervisor(house).out_of_memory() == {WORKER: 1}


async def test_a_process_that_cut_its_link_and_lives_is_killed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "PART_GRACE_S", 0.01)
    supervisor(house).want({WORKER: (1, "v1")})
    (name,) = await house.until(1)
    supervisor(house).parted(name, "its link ended")
    await house.until(2)
    assert house.ended == [(name, "killed by SIGKILL")]
