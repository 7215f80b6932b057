"""The plan: no CPU twice, nothing across domains, no siblings for engines, few moves."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from agentd.core.fold import Facts, fold
from agentd.core.plan import EngineUnit, Plan, PlanSettings, WorkerUnit, make_plan, moved
from agentd.core.topology import Overrides, Topology
from corefleet.messages.records import PoolSpec
from tests.unit.agentd.machines import found, two_sockets
from tests.unit.agentd.topologies import GIB, Node, build, without


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
    assert first.worker_cpus == (2, 3, 4, 5)
    assert first.sandbox_cpus == (6, 7)
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


SIZES = {"small": GIB, "large": 2 * GIB, "third": GIB}


def fleet(topology: Topology, *specs: PoolSpec, before: Plan | None = None, **more: object) -> Plan:
    settings = PlanSettings(**more)  # type: ignore[arg-type]
    return make_plan(topology, specs, SIZES, {}, True, settings, before)


def engines_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {unit.model: unit.cpus for unit in plan.engines}


def test_engines_end_where_caches_end() -> None:
    topology = build([Node(threads=(1,) * 24, cores_per_cache=6)])
    plan = fleet(topology, pool("a", "small"), pool("b", "large"), pool("c", "third"))
    assert plan.domains[0].engine_cpus == tuple(range(6, 24))
    assert engines_of(plan) == {
        "large": tuple(range(6, 12)),
        "small": tuple(range(12, 18)),
        "third": tuple(range(18, 24)),
    }


def test_clusters_divide_a_cache_that_all_share() -> None:
    topology = build([Node(threads=(1,) * 20, cores_per_cache=20, cores_per_cluster=4)])
    plan = fleet(topology, pool("a", "small"), pool("b", "large"))
    # Without clusters, engines would begin at CPU 5.
    assert plan.domains[0].engine_cpus == tuple(range(4, 20))
    assert engines_of(plan) == {"large": tuple(range(4, 12)), "small": tuple(range(12, 20))}


def test_engines_have_the_performance_cores_and_all_else_the_others() -> None:
    # As desktops are: eight cores of two threads, sixteen of one.
    topology = build([Node(threads=(2,) * 8 + (1,) * 16, fast=8)])
    plan = fleet(topology, pool("a", "small"))
    domain = plan.domains[0]
    assert plan.engines[0].cpus == domain.engine_cpus == tuple(range(0, 16, 2))
    assert plan.engines[0].threads == 8
    assert domain.system_cpus == (16,)
    assert set(domain.worker_cpus) | set(domain.sandbox_cpus) == set(range(17, 32))


def test_few_performance_cores_are_not_all_that_an_engine_gets() -> None:
    topology = build([Node(threads=(1,) * 12, fast=2)])
    engine = fleet(topology, pool("a", "small")).engines[0]
    assert {0, 1} < set(engine.cpus)


def test_isolated_cpus_that_are_asked_for_go_to_engines() -> None:
    topology = build([Node(threads=(1,) * 8, isolated_cores=4)])
    plan = fleet(topology, pool("a", "small"))
    assert set(range(4, 8)) <= set(plan.domains[0].engine_cpus)


def test_the_operator_names_the_cpus_of_the_system() -> None:
    topology = build([Node(), Node()])
    plan = fleet(topology, pool("a", "small"), system_cpus=(5, 99))
    assert plan.domains[0].system_cpus == (4, 5)
    assert plan.domains[1].system_cpus == plan.domains[1].worker_cpus
    assert "system_cpus: 99: not CPUs that agentd may use" in plan.warnings


def test_a_domain_without_memory_has_no_engine_and_uses_the_nearest() -> None:
    topology = build([Node(), Node(threads=()), Node(memory_bytes=0), Node()])
    plan = fleet(topology, pool("a", "small"), pool("b"))
    assert [unit.domain for unit in plan.engines] == [0, 3]
    assert plan.domains[2].memory_nodes == (3,)
    assert not plan.domains[2].engine_cpus
    assert dict(plan.domains[2].slots) == {"b": 8}
    assert any("domain 2: has no memory" in line for line in plan.warnings)
    assert "pool a is not offered in domain 2: no engine can be there" in plan.warnings


def test_memory_is_shared_out() -> None:
    topology = build([Node(memory_bytes=16 * GIB, huge_pages=1024)])
    plan = fleet(
        topology,
        pool("a", "large", workers=2, spares=1, pool_class="batch"),
        pool("b", worker_memory_bytes=3 * GIB),
        engine_memory_bytes=GIB,
    )
    domain = plan.domains[0]
    assert domain.memory_bytes == 14 * GIB
    assert domain.model_bytes == 2 * GIB
    assert plan.engines[0].memory_max == 3 * GIB
    a, b = plan.workers
    assert (a.service_class, b.service_class) == ("batch", "online")
    assert a.cpu_weight < b.cpu_weight < plan.engines[0].cpu_weight
    assert b.memory_max == 3 * GIB
    left = 14 * GIB - domain.system_memory_bytes - 3 * GIB - domain.sandbox_memory_max - 6 * GIB
    assert 0 <= left - 3 * a.memory_max < 3 << 20
    assert GIB // 2 < a.memory_high < a.memory_max


def test_replicas_are_not_charged_to_engines() -> None:
    topology = build([Node(memory_bytes=16 * GIB)])
    plan = fleet(topology, pool("a", "large"), engine_memory_bytes=GIB, model_replicas=True)
    assert plan.engines[0].memory_max == GIB
    assert plan.domains[0].model_bytes == 2 * GIB


def test_what_does_not_fit_is_not_offered_and_displaces_nothing() -> None:
    topology = build([Node(memory_bytes=4 * GIB)])
    before = fleet(topology, pool("x", "small"))
    plan = fleet(
        topology, pool("a", "large"), pool("b", workers=64), pool("x", "small"), before=before
    )
    assert [unit.pool.name for unit in plan.workers] == ["x"]
    assert plan.workers == before.workers
    assert plan.engines == before.engines
    assert any("model large is not served here" in line for line in plan.warnings)
    assert any("pool b is not offered in domain 0: its 65 workers" in x for x in plan.warnings)


def test_without_sizes_of_models_engines_have_no_limit() -> None:
    plan = make_plan(build([Node()]), [pool("a", "m")], ["m"], {}, serves_models=True)
    assert plan.engines[0].memory_max == 0
    assert plan.workers[0].memory_max > 0


def test_a_memory_that_nothing_fits_into_is_not_believed() -> None:
    plan = fleet(build([Node(memory_bytes=1 << 20)]), pool("a", "small"))
    assert plan.workers[0].memory_max == 0
    assert any("taken as unknown" in line for line in plan.warnings)


def test_a_new_model_takes_half_of_one_engine_and_the_plan_says_so() -> None:
    topology = build([Node(threads=(1,) * 16)])
    two = fleet(topology, pool("a", "small"), pool("b", "large"))
    three = fleet(topology, pool("a", "small"), pool("b", "large"), pool("c", "third"), before=two)
    assert moved(two, three) == (("engine", "large", 0),)
    assert engines_of(three)["small"] == engines_of(two)["small"]
    assert any("engine large moves" in x and "third is new" in x for x in three.warnings)
    back = fleet(topology, pool("a", "small"), pool("b", "large"), before=three)
    assert engines_of(back) == engines_of(two)
    assert any("engine large moves" in x and "third is gone" in x for x in back.warnings)


def test_a_swapped_model_moves_nobody() -> None:
    topology = build([Node(threads=(1,) * 16)])
    before = fleet(topology, pool("a", "small"), pool("b", "large"))
    after = fleet(topology, pool("a", "small"), pool("c", "third"), before=before)
    assert moved(before, after) == ()
    assert engines_of(after)["third"] == engines_of(before)["large"]


def test_a_cpu_gone_offline_shrinks_its_engine_and_comes_back_to_it() -> None:
    topology = build([Node(threads=(1,) * 16)])
    specs = (pool("a", "small"), pool("b", "large"))
    before = fleet(topology, *specs)
    gone = engines_of(before)["small"][0]
    after = fleet(without(topology, gone), *specs, before=before)
    assert moved(before, after) == (("engine", "small", 0),)
    assert any(f"CPUs {gone} are gone" in line for line in after.warnings)
    assert engines_of(fleet(topology, *specs, before=after)) == engines_of(before)


def test_the_idle_sibling_takes_the_place_of_an_engine_cpu() -> None:
    topology = build([Node()])
    specs = (pool("a", "small"), pool("b", "large"))
    before = fleet(topology, *specs)
    had = engines_of(before)["small"]
    after = fleet(without(topology, had[0]), *specs, before=before)
    assert engines_of(after)["small"] == (had[0] + 1, *had[1:])
    assert moved(before, after) == (("engine", "small", 0),)


def test_a_new_pool_changes_no_limit_while_there_is_room() -> None:
    topology = build([Node()])
    before = fleet(topology, pool("a"))
    after = fleet(topology, pool("a"), pool("b", workers=3), before=before)
    assert after.workers[0] == before.workers[0]
    crowded = fleet(topology, pool("a"), pool("b", workers=60), before=after)
    assert crowded.workers[0].memory_max < before.workers[0].memory_max
    assert any("limit of each worker of a goes from" in line for line in crowded.warnings)
