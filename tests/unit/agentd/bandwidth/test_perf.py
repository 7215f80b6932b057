"""perf_event_open: a real counter where the kernel lets us, and what a refusal says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentd.bandwidth.events import Event
from agentd.bandwidth.perf import Counter, PerfCounters
from agentd.hostfs import HostFs
from corefleet.errors import Unavailable
from tests.unit.agentd.bandwidth.fake_counters import FakeCounters

CPU_CLOCK = Event("cpu-clock", kind=1, config=0)
CPU = min(os.sched_getaffinity(0))


def test_a_software_event_counts_the_time_of_a_cpu() -> None:
    counters = PerfCounters(HostFs())
    try:
        counter = Counter(counters, CPU_CLOCK, CPU)
    except Unavailable as error:
        pytest.skip(f"perf_event_open: {error}")
    try:
        first = counter.delta()
        second = counter.delta()
    finally:
        counter.close()
    assert first is not None
    assert second is not None
    assert 0 < first < 60e9
    assert 0 < second < 60e9


def test_a_control_groups_time_on_a_cpu_is_counted() -> None:
    reasons = []
    for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified", "sys/fs/cgroup/perf_event"):
        try:
            counter = Counter(PerfCounters(HostFs()), CPU_CLOCK, CPU, mount)
        except Unavailable as error:
            reasons.append(str(error))
            continue
        try:
            deltas = [counter.delta() for _ in range(1000)]
        finally:
            counter.close()
        assert sum(delta or 0.0 for delta in deltas) > 0
        return
    pytest.skip(f"perf events of control groups: {reasons}")


def test_a_counter_that_the_cpu_has_not_is_refused_with_a_reason() -> None:
    with pytest.raises(Unavailable, match=f"no such thing on CPU {CPU}: E"):
        PerfCounters(HostFs()).open(Event("no such thing", kind=0x7FFFFFFF), CPU)


def test_a_control_group_that_is_not_there_is_refused() -> None:
    with pytest.raises(Unavailable, match=r"control group sys/fs/cgroup/none\.slice: No such"):
        PerfCounters(HostFs()).open(CPU_CLOCK, CPU, "sys/fs/cgroup/none.slice")


def test_a_recorded_machine_has_no_counters(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="recorded"):
        PerfCounters(HostFs(tmp_path)).open(CPU_CLOCK, CPU)


def test_a_counter_that_cannot_be_read_is_not_left_open() -> None:
    counters = FakeCounters(gone=True)
    with pytest.raises(Unavailable):
        Counter(counters, CPU_CLOCK, CPU)
    assert counters.opened == {}


def test_a_closed_counter_is_gone() -> None:
    end, other = os.pipe()
    os.close(other)
    try:
        with pytest.raises(Unavailable, match="gone"):
            PerfCounters(HostFs()).read(end)
    finally:
        os.close(end)
    with pytest.raises(Unavailable, match="cannot be read"):
        PerfCounters(HostFs()).read(end)
