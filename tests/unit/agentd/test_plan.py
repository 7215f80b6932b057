"""The plan: no CPU twice, nothing across domains, no siblings for engines, few moves."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from agentd.core.plan import EngineUnit, Plan, WorkerUnit, make_plan
from agentd.core.topology import Facts, Overrides, Topology, fold
from corefleet.messages.records import PoolSpec
from tests.unit.agentd.machines import found, two_sockets


def pool(name: str, model: str = "", **more: object) -> PoolSpec:
    return PoolSpec(name=name, model=model, **more)  # type: ignore[arg-type]


def machine(domains: list[tuple[int, int]]) -> Topology:
    """Domains of (cores, threads a core)."""
    facts = Facts(numa=True)
    cpu = 0
    for node, (cores, threads) in enumerate(domains):
        mine: list[int] = []
        for _ in range(cores):
            core = tuple(range(cpu, cpu + threads))
            facts.siblings.update(dict.fromkeys(core, core))
            mine += core
            cpu += threads
        facts.node_cpus[node] = tuple(mine)
    facts.online = tuple(range(cpu))
    return fold(facts, Overrides())


machines = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=5).map(
    machine
)
pools = st.lists(
    st.builds(
        pool,
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(["", "small", "large"]),
    ),
    max_size=5,
    unique_by=lambda spec: spec.name,
)


def plan_for(topology: Topology, specs: list[PoolSpec], serves: bool = True) -> Plan:
    return make_plan(topology, specs, {"small", "large"}, {}, serves_models=serves)


@given(machines, pools, st.booleans())
def test_every_process_is_inside_one_domain_and_no_core_is_divided(
    topology: Topology, specs: list[PoolSpec], serves: bool
) -> None:
    plan = plan_for(topology, specs, serves)
    units: list[EngineUnit | WorkerUnit] = [*plan.engines, *plan.workers]
    for unit in units:
        assert unit.cpus
        assert set(unit.cpus) <= set(topology.domains[unit.domain].cpus)
    for domain in plan.domains.values():
        if domain.shared:
            continue
        for other in (domain.worker_cpus, domain.system_cpus):
            cores = {topology.siblings[cpu] for cpu in other}
            assert cores.isdisjoint(topology.siblings[cpu] for cpu in domain.engine_cpus)


@given(machines, pools)
def test_an_engine_has_one_thread_a_core_and_no_core_of_another(
    topology: Topology, specs: list[PoolSpec]
) -> None:
    plan = plan_for(topology, specs)
    for domain in plan.domains.values():
        engines = [unit for unit in plan.engines if unit.domain == domain.domain]
        for unit in engines:
            assert len({topology.siblings[cpu] for cpu in unit.cpus}) == len(unit.cpus)
            assert unit.threads == len(unit.cpus)
        taken = [cpu for unit in engines for cpu in unit.cpus]
        if len(domain.engine_cpus) >= len(engines):
            assert len(taken) == len(set(taken))


@given(machines, pools, pools)
def test_another_pool_moves_no_worker_and_no_other_domain(
    topology: Topology, before: list[PoolSpec], after: list[PoolSpec]
) -> None:
    old, new = plan_for(topology, before), plan_for(topology, after)
    cpus = {(unit.pool.name, unit.domain): unit.cpus for unit in old.workers}
    for unit in new.workers:
        assert cpus.get((unit.pool.name, unit.domain), unit.cpus) == unit.cpus


@given(machines, pools)
def test_the_order_of_pools_is_no_matter(topology: Topology, specs: list[PoolSpec]) -> None:
    assert plan_for(topology, specs) == plan_for(topology, list(reversed(specs)))


def test_a_large_machine_is_divided(tmp_path: Path) -> None:
    topology = machine([(16, 2), (16, 2)])
    plan = plan_for(topology, [pool("a", "small")])
    first, second = plan.domains[0], plan.domains[1]
    assert first.system_cpus == (0, 1)
    assert first.worker_cpus == (2, 3, 4, 5, 6, 7)
    assert first.engine_cpus == tuple(range(8, 32, 2))
    assert len(second.engine_cpus) == 12
    assert [engine.threads for engine in plan.engines] == [12, 12]


def test_without_models_workers_have_all(tmp_path: Path) -> None:
    topology = found(tmp_path, two_sockets())
    plan = plan_for(topology, [pool("a")], serves=False)
    assert plan.domains[0].worker_cpus == topology.domains[0].cpus
    assert not plan.engines


def test_two_cpus_are_shared_and_the_plan_says_so() -> None:
    plan = plan_for(machine([(2, 1)]), [pool("a", "small", workers=2, spares=1)])
    assert plan.domains[0].shared
    assert plan.engines[0].cpus == plan.workers[0].cpus == (0, 1)
    assert plan.engines[0].threads == 2
    assert plan.workers[0].workers == 2
    assert any("too few to divide" in line for line in plan.warnings)


def test_a_pool_without_its_model_is_not_offered() -> None:
    plan = plan_for(machine([(2, 1)]), [pool("a", "huge"), pool("b", "small")])
    assert [unit.pool.name for unit in plan.workers] == ["b"]
    assert dict(plan.domains[0].slots) == {"b": 8}
    assert any("model huge is not here" in line for line in plan.warnings)


def test_a_pool_of_other_labels_is_none_of_our_business() -> None:
    spec = pool("a", labels={"disk": "nvme"})
    topology = machine([(2, 1)])
    assert not make_plan(topology, [spec], (), {}, serves_models=False).workers
    assert make_plan(topology, [spec], (), {"disk": "nvme"}, serves_models=False).workers


def test_models_divide_the_engine_cpus() -> None:
    plan = plan_for(machine([(12, 1)]), [pool("a", "small"), pool("b", "large")])
    large, small = plan.engines
    assert set(large.cpus).isdisjoint(small.cpus)
    assert abs(large.threads - small.threads) <= 1
