"""Last-level cache misses by control group, and the share of loads that hit."""

from __future__ import annotations

from agentd.bandwidth.llc import HitRate, LlcSensor
from agentd.bandwidth.pipe import DomainSetup
from agentd.bandwidth.sensor import Load
from tests.unit.agentd.bandwidth.fake_counters import FakeCounters

BATCH, ONLINE = "sys/fs/cgroup/b.slice", "sys/fs/cgroup/o.slice"
DOMAINS = (
    DomainSetup(domain=0, cpus=(0, 1), groups=(BATCH, ONLINE), batch_group=BATCH),
    DomainSetup(domain=2, cpus=(2,), groups=(BATCH, ONLINE), batch_group=BATCH),
)


def test_misses_of_the_groups_are_lines_of_64_bytes_and_batch_is_a_part() -> None:
    counters = FakeCounters()
    sensor = LlcSensor(DOMAINS, counters)
    assert sensor.available() is None
    assert sensor.sample(0.0) == {}
    counters.count("LLC-load-misses", 10, cpu=0, group=BATCH)
    counters.count("LLC-store-misses", 1, cpu=1, group=BATCH)
    counters.count("LLC-load-misses", 5, cpu=1, group=ONLINE)
    counters.count("LLC-load-misses", 3, cpu=2, group=ONLINE)
    assert sensor.sample(2.0) == {
        0: Load(bytes_per_s=16 * 64 / 2, batch_bytes_per_s=11 * 64 / 2),
        2: Load(bytes_per_s=3 * 64 / 2, batch_bytes_per_s=0.0),
    }
    sensor.close()
    assert counters.opened == {}


def test_a_cpu_that_counts_no_stores_counts_loads() -> None:
    counters = FakeCounters(refuse=("LLC-store-misses",))
    sensor = LlcSensor(DOMAINS, counters)
    assert sensor.available() is None
    assert {event.name for event, _, _ in counters.opened.values()} == {"LLC-load-misses"}
    # LL, read, miss.
    assert {event.config for event, _, _ in counters.opened.values()} == {0x10002}
    sensor.close()


def test_a_cpu_that_counts_nothing_says_so_and_leaves_nothing_open() -> None:
    counters = FakeCounters(refuse=("LLC",))
    assert "LLC-load-misses on CPU 0" in (LlcSensor(DOMAINS, counters).available() or "")
    assert counters.opened == {}


def test_without_control_groups_there_is_nothing_to_count() -> None:
    bare = (DomainSetup(domain=7, cpus=(0,)),)
    assert "domain 7: no control groups" in (LlcSensor(bare, FakeCounters()).available() or "")


def test_the_hit_rate_is_that_of_loads_on_the_domains_cpus() -> None:
    counters = FakeCounters()
    hits = HitRate(DOMAINS, counters)
    assert hits.sample() == {}
    counters.count("LLC-loads", 100, cpu=0)
    counters.count("LLC-load-misses", 25, cpu=0)
    assert hits.sample() == {0: 0.75}
    counters.gone = True
    assert hits.sample() == {}
    assert hits.why_not == "a counter is gone"
    assert counters.opened == {}


def test_the_hit_rate_looks_at_a_sample_of_many_cpus() -> None:
    counters = FakeCounters()
    hits = HitRate((DomainSetup(domain=0, cpus=tuple(range(100))),), counters)
    cpus = {cpu for _, cpu, _ in counters.opened.values()}
    assert 8 <= len(cpus) <= 16
    assert max(cpus) > 80
    hits.close()
    assert counters.opened == {}


def test_no_hit_rate_where_misses_are_not_counted() -> None:
    counters = FakeCounters(refuse=("LLC-load-misses",))
    hits = HitRate(DOMAINS, counters)
    assert hits.sample() == {}
    assert "LLC-load-misses" in (hits.why_not or "")
    assert counters.opened == {}
