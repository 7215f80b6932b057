"""One run: a plan goes in, an outcome comes out, the same to the byte each time."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog

from controld.core.admission import Admission, Refusal
from controld.core.shard_io import Action
from controld.runner import ShardRunner
from corefleet.codec import encode
from corefleet.store import Put
from corefleet.subjects import pool_key
from tests.sim.client import SimClients
from tests.sim.faults import Faults
from tests.sim.fleet import SimFleet
from tests.sim.loop import START_S, SimulationError, silence
from tests.sim.plan import Plan, controlds_of, nodes_of
from tests.sim.properties import Violation
from tests.sim.wires import drawn

HEALED_S = 10.0
"""After the last fault may begin, so that all has ended by then."""
GRACE_S = 15.0
"""Beyond the work that one session has to do by itself, within this after the last fault
everything accepted has ended."""
START_WITHIN_S = 0.8
_LOOK_EVERY_S = 0.1
_NOTHING = 50


@dataclass(slots=True)
class Outcome:
    """How a run went. `violation` is '' when all properties held."""

    plan: Plan
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    digest: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    simulated_s: float = 0.0


def simulate(plan: Plan) -> Outcome:
    """Run a plan."""
    outcome = Outcome(plan)
    with contextlib.ExitStack() as stack:
        for surrounding in (_quiet(), _without_collector(), _seeded(plan.seed)):
            stack.enter_context(surrounding)
        _simulate(plan, outcome)
    outcome.digest = hashlib.blake2b("\n".join(outcome.trace).encode(), digest_size=16).hexdigest()
    return outcome


def _simulate(plan: Plan, outcome: Outcome) -> None:
    with contextlib.ExitStack() as stack:
        fleet = SimFleet(plan)
        clients = SimClients(fleet)
        stack.callback(fleet.bury, [clients.process])
        stack.callback(fleet.close)
        stack.enter_context(_watched(fleet))
        try:
            _run(fleet, clients)
        except (Violation, SimulationError) as error:
            outcome.violation = str(error) or repr(error)
        outcome.trace = fleet.trace
        outcome.counts = fleet.properties.counts
        outcome.simulated_s = fleet.now - START_S


def _run(fleet: SimFleet, clients: SimClients) -> None:
    """Let it all happen. Raises Violation, SimulationError."""
    plan, faults, rng = fleet.plan, Faults(fleet, clients), fleet.rng("run")
    for pool in fleet.pools:
        fleet.etcd.tables.apply([Put(pool_key(pool.name), encode(pool))])
    for name in controlds_of(plan.sizes):
        fleet.after(drawn(rng, 0.0, START_WITHIN_S), fleet.start_controld, name)
    for name in nodes_of(plan.sizes):
        fleet.after(drawn(rng, 0.0, START_WITHIN_S), fleet.start_node, name)
    for work in plan.work:
        fleet.at(START_S + work.at, clients.start, work)
    for fault in plan.faults:
        fleet.at(START_S + fault.at, faults.begin, fault)
    healed = START_S + plan.faults_s + HEALED_S
    properties = fleet.properties
    _until(fleet, healed, lambda: faults.over and properties.all_ended())
    bound_s = GRACE_S + longest_session_s(plan)
    _until(fleet, healed + bound_s, properties.all_ended)
    if not properties.all_ended():
        lines = "; ".join(properties.unfinished())
        raise Violation(f"ends: not ended {bound_s:.0f} s after all healed: {lines}")
    properties.check_end()


def longest_session_s(plan: Plan) -> float:
    """Return how long the session with the most work needs for it, one task after another."""
    needs: dict[tuple[str, str], float] = {}
    for work in plan.work:
        key = (work.pool, work.session)
        needs[key] = needs.get(key, 0.0) + work.steps * work.step_s
    return max(needs.values(), default=0.0)


def _until(fleet: SimFleet, end: float, done: Callable[[], bool]) -> None:
    look_at = 0.0

    def over() -> bool:
        nonlocal look_at
        if fleet.violation is not None:
            return True
        if fleet.now < look_at:
            return False
        look_at = fleet.now + _LOOK_EVERY_S
        return done()

    fleet.run_until(end, over)
    if fleet.violation is not None:
        raise fleet.violation


@contextlib.contextmanager
def _watched(fleet: SimFleet) -> Iterator[None]:
    """Have every decision of a shard's owner, and of admission, told to the fleet."""
    carry_out, admit = ShardRunner._carry_out, Admission.admit

    def told(self: ShardRunner, action: Action) -> None:
        fleet.decides(self, action)
        carry_out(self, action)

    def admitted(self: Admission, pool: str, *more: Any, **named: Any) -> Refusal | None:
        refusal = admit(self, pool, *more, **named)
        if refusal is None:
            fleet.properties.admitted(fleet.now, pool)
        return refusal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardRunner, "_carry_out", told)
        patch.setattr(Admission, "admit", admitted)
        # The CPU that this machine spends is no part of a run.
        patch.setattr("controld.quotas._used", lambda now: (now, 0.0, 0.0))
        yield


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Let nothing be found dead in the middle of a run: that would not repeat itself."""
    gc.disable()
    gc.freeze()  # what was there before need not be looked at afterwards
    try:
        yield
    finally:
        gc.enable()
        with silence():
            gc.collect()
        gc.unfreeze()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Give the jitter of back-offs its seed: `corefleet` draws it from the module's generator."""
    state = random.getstate()
    random.seed(f"global {seed}")
    try:
        yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let nothing be logged: what faults do to programs fills screens."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_NOTHING))
    try:
        yield
    finally:
        structlog.configure(**before)
