"""Faults as values: begun, held, undone; and what the load says of the time in between."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tests.faults.load import Load, Promise, now_ms
from tests.faults.plant import Plant

LONG = bool(os.environ.get("CI_LONG"))
"""Faults of 30 s, too."""

CUT_S = 5.0
DELAY_MS = 50
DELAY_S = 3.0
WINDOW_MS = 10_000
"""What begins so long after a fault is still counted as touched by it."""
BACK_S = 60.0
"""How long all work may take to be done after a fault; far above any goal."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a host. `held_s` is how long it lasts."""

    name: str
    begin: Callable[[Plant, str], None]
    held_s: float
    end: Callable[[Plant, str], None] | None
    """None: the program is started again."""


def _freeze(seconds: float) -> Fault:
    return Fault(f"frozen {seconds:g} s", Plant.freeze, seconds, Plant.thaw)


KILL = Fault("kill -9", Plant.kill, 0.0, None)
FREEZE_1, FREEZE_5, FREEZE_30 = _freeze(1.0), _freeze(5.0), _freeze(30.0)
CUT = Fault(
    f"cut off {CUT_S:g} s",
    lambda plant, host: plant.lan.cut(host),
    CUT_S,
    lambda plant, host: plant.lan.mend(host),
)
DELAY = Fault(
    f"packets {DELAY_MS} ms late each way",
    lambda plant, host: plant.lan.delay(host, DELAY_MS),
    DELAY_S,
    lambda plant, host: plant.lan.undelay(host),
)
FAULTS = [KILL, FREEZE_1, FREEZE_5, CUT, DELAY, *([FREEZE_30] if LONG else [])]


async def suffer(plant: Plant, fault: Fault, *hosts: str) -> int:
    """Let `fault` happen to `hosts` at once; return when it began, in wall milliseconds.

    Returns when nothing of it is left and all that was submitted meanwhile has ended.
    """
    at_ms = now_ms()
    for host in hosts:
        fault.begin(plant, host)
    try:
        await asyncio.sleep(fault.held_s)
        if fault.end is None:
            await plant.load.all_before(at_ms, BACK_S)
    finally:
        if fault.end is None:
            await asyncio.gather(*(plant.start_program(host) for host in hosts))
        else:
            for host in hosts:
                fault.end(plant, host)
    await recovered(plant)
    return at_ms


async def recovered(plant: Plant) -> None:
    """Return when the plant is whole and all that was submitted until now has ended, right."""
    await plant.load.all_before(now_ms(), BACK_S)
    await plant.whole()
    assert plant.load.wrong() == []
    assert plant.audit.wrong == []


def resumed(load: Load, at_ms: int, touched: Callable[[Promise], bool]) -> list[float]:
    """Seconds of the longest standstill of every touched task that was running at `at_ms`.

    That is from `at_ms` to its next step, or between two steps later on, or to its end.
    """
    found = []
    for promise in load.live_at(at_ms):
        started = [step.started_ms for step in promise.links()]
        if not started or started[0] > at_ms or not touched(promise):
            continue
        pause_ms = load.sessions[promise.session].pause_ms
        ends = [*started[1:], promise.finished_ms]
        found.append(
            max(
                end - (at_ms if start <= at_ms else start + pause_ms)
                for start, end in zip(started, ends, strict=True)
                if end > at_ms
            )
            / 1000
        )
    return found


def waited(load: Load, at_ms: int, sessions: Collection[str]) -> list[float]:
    """Seconds of the longest wait of each session, of its tasks that could start from `at_ms` on.

    A task can start when it is accepted and the task before is at its end.
    """
    found = []
    for name in sessions:
        could_ms = 0
        waits = []
        for promise in sorted(
            (p for p in load.promises.values() if p.session == name), key=lambda p: p.number
        ):
            started = [step.started_ms for step in promise.links()]
            if not started:
                continue
            could_ms = max(could_ms, promise.accepted_ms)
            if at_ms < started[0] and could_ms < at_ms + WINDOW_MS:
                waits.append((started[0] - max(could_ms, at_ms)) / 1000)
            could_ms = started[-1] + load.sessions[name].pause_ms
        if waits:
            found.append(max(waits))
    return found


def admitted(load: Load, at_ms: int) -> list[float]:
    """Seconds until submissions under way at `at_ms`, or made soon after, were accepted."""
    return [
        (p.accepted_ms - max(at_ms, p.submitted_ms)) / 1000
        for p in load.promises.values()
        if p.accepted_ms > at_ms and p.submitted_ms < at_ms + WINDOW_MS
    ]


def ran_on(*nodes: str) -> Callable[[Promise], bool]:
    """Whether a task had run a step on one of `nodes`."""
    return lambda promise: any(step.node in nodes for step in promise.links())
