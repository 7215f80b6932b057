"""A plan that fails is made smaller without ceasing to fail."""

from __future__ import annotations

from tests.sim.plan import FAULTS_S, Fault, Plan, draw_plan
from tests.sim.shrink import shrink

GUILTY = "crash"


def test_only_what_makes_it_fail_is_left() -> None:
    plan = next(plan for plan in map(draw_plan, range(100)) if _fails(plan))
    smaller = shrink(plan, _fails)
    assert [fault.kind for fault in smaller.faults] == [GUILTY]
    assert [work.twice for work in smaller.work] == [True]
    assert set(smaller.work) <= set(plan.work)


def test_a_plan_is_the_same_each_time_and_its_faults_lie_within_their_time() -> None:
    for seed in range(50):
        plan = draw_plan(seed)
        assert plan == draw_plan(seed)
        assert all(isinstance(fault, Fault) and fault.at <= FAULTS_S for fault in plan.faults)


def _fails(plan: Plan) -> bool:
    guilty = any(fault.kind == GUILTY for fault in plan.faults)
    return guilty and any(work.twice for work in plan.work)
