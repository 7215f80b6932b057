"""Which source is chosen, and what a Report says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from agentd.bandwidth.app import sensors
from agentd.bandwidth.monitoring import ResctrlSensor
from agentd.bandwidth.peaks import FLOOR_BYTES_PER_S, Peaks
from agentd.bandwidth.pipe import SOURCES, DomainSetup, Setup, domain_setups, line_of, read_line
from agentd.bandwidth.pressure import PressureSensor
from agentd.bandwidth.report import DomainLoad, Report, Source
from agentd.bandwidth.select import choose
from agentd.bandwidth.sensor import Load
from agentd.bandwidth.watch import Watch
from agentd.core.topology import CacheGroup
from agentd.hostfs import HostFs
from corefleet.errors import CorruptRecord, Incompatible, Unavailable
from tests.unit.agentd.bandwidth.fake_counters import FakeCounters
from tests.unit.agentd.machines import found, two_sockets, write_tree

SETUP = Setup(
    node="n1",
    domains=(
        DomainSetup(domain=0, cpus=(0, 1), peak_bytes_per_s=100e9),
        DomainSetup(domain=3, cpus=(2, 3)),
    ),
)


@dataclass
class Scripted:
    """A source that says what a test says; `why` when it is not usable."""

    source: Source
    why: str | None = None
    loads: list[Mapping[int, Load] | Unavailable] = field(default_factory=list)
    asked: int = 0
    closed: int = 0

    def available(self) -> str | None:
        self.asked += 1
        return self.why

    def sample(self, now: float) -> Mapping[int, Load]:
        said = self.loads.pop(0)
        if isinstance(said, Unavailable):
            raise said
        return said

    def close(self) -> None:
        self.closed += 1


def test_the_first_usable_source_is_chosen_and_better_ones_say_why_not() -> None:
    best, next_best, rest = Scripted("uncore", "no rights"), Scripted("llc"), Scripted("canary")
    assert choose((best, next_best, rest)) == (next_best, ("uncore: no rights",))
    assert (best.closed, next_best.closed, rest.asked) == (1, 0, 0)


def test_without_a_usable_source_all_reasons_are_told() -> None:
    with pytest.raises(Unavailable, match="uncore: a; llc: b"):
        choose((Scripted("uncore", "a"), Scripted("llc", "b")))
    with pytest.raises(Unavailable, match="none allowed"):
        choose(())


def test_a_report_tells_all_that_is_known(tmp_path: Path) -> None:
    host = write_tree(
        tmp_path,
        {
            "proc/pressure/memory": "some avg10=1.00 avg60=0.00 avg300=0.00 total=0\n",
            "proc/stat": "cpu  0 0 0 0 0 0 0 0 0 0\n",
            "sys/devices/system/node/node0/numastat": "local_node 0\nother_node 0\n",
        },
    )
    counters = FakeCounters()
    source = Scripted("uncore", loads=[{0: Load(25e9, 5e9), 3: Load(2e9)}, {0: Load(25e9)}])
    watch = Watch(SETUP, host, counters, (Scripted("resctrl", "not mounted"), source))
    write_tree(
        tmp_path,
        {
            "proc/stat": "cpu  9 0 0 0 0 0 0 1 0 0\n",
            "sys/devices/system/node/node0/numastat": "local_node 3\nother_node 1\n",
        },
    )
    counters.count("LLC-loads", 10, cpu=0)
    counters.count("LLC-load-misses", 1, cpu=0)
    assert watch.report(10.0) == Report(
        number=1,
        interval_s=0.5,
        source="uncore",
        why_not=("resctrl: not mounted",),
        domains=(
            DomainLoad(
                domain=0,
                utilisation=0.25,
                bytes_per_s=25e9,
                peak_bytes_per_s=100e9,
                batch_bytes_per_s=5e9,
                llc_hit=0.9,
                remote_share=0.25,
            ),
            DomainLoad(
                domain=3,
                utilisation=2e9 / FLOOR_BYTES_PER_S,
                bytes_per_s=2e9,
                peak_bytes_per_s=FLOOR_BYTES_PER_S,
            ),
        ),
        steal=0.1,
        memory_pressure=0.01,
    )
    second = watch.report(10.75)
    assert (second.number, second.interval_s) == (2, 0.75)
    assert second.domains[1] == DomainLoad(domain=3)
    watch.close()
    assert counters.opened == {}


def test_a_source_that_goes_away_is_replaced_by_the_next_best(tmp_path: Path) -> None:
    lost = Scripted("uncore", loads=[{}, Unavailable("a counter is gone")])
    unusable, last = Scripted("llc", "no groups"), Scripted("canary", loads=[{}, {}])
    watch = Watch(SETUP, HostFs(tmp_path), FakeCounters(), (lost, unusable, last))
    assert watch.report(0.0).source == "uncore"
    report = watch.report(1.0)
    assert report.source == "canary"
    assert report.why_not == ("uncore: a counter is gone", "llc: no groups")
    assert lost.closed == 1
    assert watch.report(2.0).why_not == report.why_not
    watch.close()


def test_a_peak_is_as_configured_or_grows_with_what_was_seen() -> None:
    peaks = Peaks(SETUP.domains)
    for domain in (0, 3):
        peaks.see(domain, 50e9)
        peaks.see(domain, 40e9)
    peaks.see(0, 500e9)
    assert peaks.of(0) == 100e9
    assert peaks.of(3) == 50e9


def test_a_large_domain_has_a_higher_floor() -> None:
    peaks = Peaks((DomainSetup(domain=0, cpus=tuple(range(64))),))
    assert peaks.of(0) == 128e9


def test_the_allowed_sources_come_in_their_order(tmp_path: Path) -> None:
    setup = Setup(node="n", domains=SETUP.domains, sources=("pressure", "llc", "canary", "uncore"))
    live = sensors(setup, HostFs(), FakeCounters())
    assert [one.source for one in live] == ["uncore", "llc", "canary", "pressure"]
    recorded = sensors(SETUP, HostFs(tmp_path), FakeCounters())
    assert [one.source for one in recorded] == [one for one in SOURCES if one != "canary"]


def test_resctrl_is_a_source_where_its_monitor_opens() -> None:
    class Fixed:
        def sample(self, now: float) -> Mapping[int, tuple[float, float | None]] | None:
            return {1: (5.0, None)} if now else None

    def raises() -> str:
        raise Incompatible("ids of another machine")

    assert ResctrlSensor(lambda: "resctrl monitoring: not mounted").available() == "not mounted"
    assert ResctrlSensor(raises).available() == "ids of another machine"
    sensor = ResctrlSensor(Fixed)
    assert sensor.available() is None
    assert sensor.sample(0.0) == {}
    assert sensor.sample(1.0) == {1: Load(bytes_per_s=5.0)}
    sensor.close()


def test_pressure_is_always_usable_and_senses_no_bandwidth() -> None:
    sensor = PressureSensor()
    assert sensor.available() is None
    assert sensor.sample(0.0) == {}


def test_the_setup_of_a_domain_comes_from_the_topology(tmp_path: Path) -> None:
    topology = replace(
        found(tmp_path, two_sockets()),
        caches=(CacheGroup((0, 1, 8), 2048, 0), CacheGroup((2, 3), 512, 1)),
    )
    first, second = domain_setups(
        topology,
        canary_cpus={0: (0,)},
        peaks={1: 9e9},
        groups={1: ("a", "b")},
        batch_groups={1: "b"},
    )
    assert first == DomainSetup(
        domain=0, cpus=(0, 1, 2, 3, 8, 9, 10, 11), canary_cpus=(0,), l3_bytes=2 << 20
    )
    assert (second.l3_bytes, second.peak_bytes_per_s) == (0, 9e9)
    assert (second.groups, second.batch_group) == (("a", "b"), "b")


def test_lines_are_read_back() -> None:
    report = Report(number=1, interval_s=0.5, source="llc", domains=(DomainLoad(domain=2),))
    assert read_line(line_of(SETUP), Setup) == SETUP
    assert read_line(line_of(report), Report) == report
    with pytest.raises(CorruptRecord, match="Report"):
        read_line(b"{}", Report)
