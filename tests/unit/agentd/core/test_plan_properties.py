"""What holds for the plan of every machine, drawn or recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from agentd.core.plan import EngineUnit, Plan, PlanSettings, WorkerUnit, make_plan, moved
from agentd.core.topology import Overrides, Topology
from agentd.hostfs import HostFs
from agentd.probes import discover
from corefleet.messages.records import PoolSpec
from tests.unit.agentd.topologies import GIB, RECORDED, machines, recorded, unpack, without

MODELS: Mapping[str, int] = {
    "small": GIB // 4,
    "middle": GIB,
    "large": 8 * GIB,
    "other": GIB // 2,
    "more": GIB // 2,
}

specs = st.builds(
    PoolSpec,
    name=st.sampled_from("abcdefgh"),
    model=st.sampled_from(["", *MODELS]),
    workers=st.integers(1, 3),
    spares=st.integers(0, 1),
    pool_class=st.sampled_from(("online", "batch")),
    worker_memory_bytes=st.sampled_from((0, 0, 0, GIB // 8, 4 * GIB)),
)
pools = st.lists(specs, max_size=8, unique_by=lambda spec: spec.name)
settings = st.builds(
    PlanSettings,
    system_cpus=st.sampled_from(((), (), (0,), (1, 5, 9999))),
    system_cores_per_domain=st.integers(0, 2),
    sandbox_share=st.sampled_from((0.0, 0.25, 1.0)),
    engine_memory_bytes=st.sampled_from((0, GIB // 16)),
    model_replicas=st.booleans(),
)


def plan_of(
    topology: Topology,
    wanted: list[PoolSpec],
    before: Plan | None = None,
    given_settings: PlanSettings | None = None,
    serves: bool = True,
) -> Plan:
    return make_plan(topology, wanted, MODELS, {}, serves, given_settings, before)


def check(topology: Topology, plan: Plan, settings: PlanSettings | None = None) -> None:
    """Check all that must hold of any plan."""
    settings = settings or PlanSettings()
    assert list(plan.domains) == list(topology.domains)
    check_roles(topology, plan)
    check_units(topology, plan)
    check_memory(topology, plan, settings)


def check_roles(topology: Topology, plan: Plan) -> None:
    for number, domain in plan.domains.items():
        mine = set(topology.domains[number].cpus)
        assert domain.cpus == topology.domains[number].cpus
        assert domain.worker_cpus
        assert domain.sandbox_cpus
        assert domain.system_cpus
        roles = [domain.engine_cpus, domain.worker_cpus]
        roles += [cpus for cpus in (domain.system_cpus, domain.sandbox_cpus) if cpus != roles[1]]
        assert mine.issuperset(cpu for cpus in roles for cpu in cpus)
        engine_cores = [topology.siblings[cpu] for cpu in domain.engine_cpus]
        assert len(engine_cores) == len(set(engine_cores))
        if domain.shared:
            assert len(topology.cores(domain.worker_cpus)) <= 2
            assert any(f"domain {number}: " in line and "too few" in line for line in plan.warnings)
            continue
        times = Counter(cpu for cpus in roles for cpu in cpus)
        assert not [cpu for cpu, count in times.items() if count > 1]
        others = {topology.siblings[cpu] for cpus in roles[1:] for cpu in cpus}
        assert others.isdisjoint(engine_cores)
        # Nothing is forgotten: what has no role is the idle sibling of an engine's CPU.
        assert mine <= set(times).union(*engine_cores)


def check_units(topology: Topology, plan: Plan) -> None:
    units: list[EngineUnit | WorkerUnit] = [*plan.engines, *plan.workers]
    for unit in units:
        assert unit.cpus
        assert set(unit.cpus) <= set(topology.domains[unit.domain].cpus)
        assert list(unit.cpus) == sorted(set(unit.cpus))
        assert unit.tasks_max > 0
        assert 1 <= unit.cpu_weight <= 10000
        assert unit.memory_high <= unit.memory_max
    served = {(unit.model, unit.domain) for unit in plan.engines}
    assert len(served) == len(plan.engines)
    for engine in plan.engines:
        domain = plan.domains[engine.domain]
        assert engine.threads == len(topology.cores(engine.cpus)) == len(engine.cpus)
        assert set(engine.cpus) <= set(domain.engine_cpus)
        assert domain.memory_nodes == (engine.domain,)
    for number, domain in plan.domains.items():
        mine = [unit for unit in plan.engines if unit.domain == number]
        taken = sorted(cpu for unit in mine for cpu in unit.cpus)
        if mine and len(domain.engine_cpus) >= len(mine):
            assert tuple(taken) == domain.engine_cpus
        offered = {u.pool.name: u.pool.slots for u in plan.workers if u.domain == number}
        assert dict(domain.slots) == offered
    for worker in plan.workers:
        assert worker.cpus == plan.domains[worker.domain].worker_cpus
        assert worker.service_class == worker.pool.pool_class
        assert not worker.pool.model or (worker.pool.model, worker.domain) in served


def check_memory(topology: Topology, plan: Plan, settings: PlanSettings) -> None:
    known = [
        node for node in {*topology.nodes, *topology.domains} if node_memory(topology, node) > 0
    ]
    for number, domain in plan.domains.items():
        (node,) = domain.memory_nodes
        if number in known or not known:
            assert node == number
        elif number in topology.nodes and topology.nodes[number].memory_bytes is None:
            assert node == number
            assert not domain.memory_bytes
        else:
            assert node in known
    for node in {domain.memory_nodes[0] for domain in plan.domains.values()}:
        tenants = {n: d for n, d in plan.domains.items() if d.memory_nodes == (node,)}
        first = next(iter(tenants.values()))
        workers = [unit for unit in plan.workers if unit.domain in tenants]
        if not first.memory_bytes:
            assert all(u.memory_max == u.pool.worker_memory_bytes for u in workers)
            assert all(not u.memory_max for u in plan.engines if u.domain in tenants)
            continue
        assert first.memory_bytes <= node_memory(topology, node)
        used = sum(unit.memory_max * (unit.workers + unit.spares) for unit in workers)
        used += sum(unit.memory_max for unit in plan.engines if unit.domain in tenants)
        used += sum(d.sandbox_memory_max for d in tenants.values())
        if settings.model_replicas:
            used += sum(d.model_bytes for d in tenants.values())
        assert used <= first.memory_bytes - first.system_memory_bytes
        assert all(unit.memory_max for unit in plan.engines if unit.domain in tenants)
        for unit in workers:
            least = unit.pool.worker_memory_bytes or settings.worker_memory_floor_bytes
            assert unit.memory_max >= least


def node_memory(topology: Topology, node: int) -> int:
    known = topology.nodes.get(node)
    if known is not None and known.memory_bytes is not None:
        return known.memory_bytes
    return topology.domains[node].memory_bytes if node in topology.domains else 0


def by_domain(plan: Plan, domain: int) -> dict[str, tuple[int, ...]]:
    return {unit.model: unit.cpus for unit in plan.engines if unit.domain == domain}


@limits(max_examples=60)
@given(machines(), pools, settings, st.booleans())
def test_every_plan_is_sound(
    topology: Topology, wanted: list[PoolSpec], given_settings: PlanSettings, serves: bool
) -> None:
    plan = plan_of(topology, wanted, None, given_settings, serves)
    check(topology, plan, given_settings)
    assert plan == plan_of(topology, list(reversed(wanted)), None, given_settings, serves)


@limits(max_examples=60)
@given(machines(), pools, settings)
def test_the_same_again_changes_nothing(
    topology: Topology, wanted: list[PoolSpec], given_settings: PlanSettings
) -> None:
    plan = plan_of(topology, wanted, None, given_settings)
    again = plan_of(topology, wanted, plan, given_settings)
    assert (again.domains, again.engines, again.workers) == (
        plan.domains,
        plan.engines,
        plan.workers,
    )


@limits(max_examples=60)
@given(machines(), st.lists(pools, min_size=2, max_size=5))
def test_a_replan_is_sound_and_moves_one_engine_for_each_that_comes_or_goes(
    topology: Topology, wanted: list[list[PoolSpec]]
) -> None:
    plan = plan_of(topology, wanted[0])
    for now in wanted[1:]:
        before, plan = plan, plan_of(topology, now, plan)
        check(topology, plan)
        moves = moved(before, plan)
        assert not [key for key in moves if key[0] == "worker"]
        for number, domain in plan.domains.items():
            assert domain.worker_cpus == before.domains[number].worker_cpus
            assert domain.engine_cpus == before.domains[number].engine_cpus
            had, have = by_domain(before, number), by_domain(plan, number)
            if max(len(had), len(have)) <= len(domain.engine_cpus):
                changes = len(had.keys() ^ have.keys())
                assert sum(key[2] == number for key in moves) <= changes
        for kind, name, number in moves:
            assert any(
                line.startswith(f"domain {number}: {kind} {name} moves") for line in plan.warnings
            )


@limits(max_examples=60)
@given(machines(), pools, specs)
def test_a_pool_that_comes_or_goes_changes_limits_of_others_only_at_need(
    topology: Topology, wanted: list[PoolSpec], added: PoolSpec
) -> None:
    others = [pool for pool in wanted if pool.name != added.name]
    without_it = plan_of(topology, others)
    with_it = plan_of(topology, [*others, added], without_it)
    for before, after in ((without_it, with_it), (with_it, plan_of(topology, others, with_it))):
        check(topology, after)
        limits = {(u.pool.name, u.domain): u.memory_max for u in before.workers}
        for unit in after.workers:
            limit = limits.get((unit.pool.name, unit.domain), unit.memory_max)
            if unit.memory_max < limit:
                # It shrank because all have an equal share, and no more than that is there.
                assert unit.memory_max < PlanSettings().worker_memory_bytes
                assert len({u.pool.name for u in after.workers}) > 1 or after.engines
            elif unit.memory_max > limit:
                assert unit.memory_max > 2 * limit


@limits(max_examples=60)
@given(machines(), pools, st.data())
def test_a_cpu_gone_offline_moves_only_who_had_it(
    topology: Topology, wanted: list[PoolSpec], data: st.DataObject
) -> None:
    before = plan_of(topology, wanted)
    gone = data.draw(st.sampled_from(topology.online))
    left = without(topology, gone)
    if not left.domains:
        return
    after = plan_of(left, wanted, before)
    check(left, after)
    home = next(n for n, domain in topology.domains.items() if gone in domain.cpus)
    old, new = before.domains[home], after.domains.get(home)
    if new is None:
        assert not [key for key in moved(before, after) if key[2] == home]
        return
    divided_anew = old.shared or any(
        old_cpus == (gone,) for old_cpus in (old.worker_cpus, old.engine_cpus)
    )
    had = {("engine", unit.model, unit.domain) for unit in before.engines if gone in unit.cpus}
    had |= {("worker", u.pool.name, u.domain) for u in before.workers if gone in u.cpus}
    moves = set(moved(before, after))
    assert {key[2] for key in moves} <= {home}
    crowded = len(old.engine_cpus) <= len(by_domain(before, home))
    if not divided_anew and not crowded:
        # An engine that lost its only CPU lives on half of the largest one's.
        orphans = sum(unit.cpus == (gone,) for unit in before.engines)
        assert len(moves - had) <= orphans
    again = plan_of(topology, wanted, after)
    check(topology, again)


@limits(max_examples=60)
@given(machines(), pools)
def test_engines_have_performance_cores_where_there_are_enough(
    topology: Topology, wanted: list[PoolSpec]
) -> None:
    plan = plan_of(topology, wanted)
    fast = {c for kind in topology.kinds if kind.name == "performance" for c in kind.cpus}
    for domain in plan.domains.values():
        cores = [core[0] for core in topology.cores(domain.cpus)]
        quick = sum(cpu in fast for cpu in cores)
        if domain.shared or not domain.engine_cpus or quick in (0, len(cores)):
            continue
        if quick >= 2 and 4 * quick >= len(cores):
            # At most one is the system's, where there was a single efficiency core.
            assert len(fast.intersection(domain.engine_cpus)) >= 1
            slow_at_work = set(domain.engine_cpus) - fast
            assert not slow_at_work


@pytest.mark.parametrize("name", recorded() or ["none"])
def test_the_plan_of_a_recorded_machine_is_sound(name: str, tmp_path: Path) -> None:
    archives = recorded()
    if not archives:
        pytest.skip(f"no recorded machines in {RECORDED}: set COREFLEET_MACHINES")
    topology = discover(HostFs(unpack(archives[name], tmp_path)), Overrides())
    wanted = [PoolSpec(name="a", model="small"), PoolSpec(name="b"), PoolSpec(name="c")]
    plan = plan_of(topology, wanted)
    check(topology, plan)
    assert plan.workers or not topology.domains
    isolated = set(topology.sets.isolated)
    units: list[EngineUnit | WorkerUnit] = [*plan.engines, *plan.workers]
    for unit in units:
        assert isolated.isdisjoint(unit.cpus)
        assert set(unit.cpus) <= set(topology.online)
    more = plan_of(topology, [*wanted, PoolSpec(name="d", model="other")], plan)
    check(topology, more)
    assert len(moved(plan, more)) <= len(topology.domains)
