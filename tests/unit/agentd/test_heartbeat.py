"""The heartbeat program's parts: what a beat tells, and how load is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentd.heartbeat.beat import Heart
from agentd.heartbeat.load import LoadSampler
from agentd.heartbeat.pipe import Setup, Status, line_of, read_line
from corefleet.config import LogConfig, NatsConfig
from corefleet.errors import CorruptRecord
from corefleet.messages.wire import SlotUse, SlowTask
from tests.unit.agentd.machines import write_tree

SETUP = Setup("n1", "rack0", NatsConfig(), LogConfig(), 0.2, (0, 2))
STATUS = Status(
    number=1,
    epoch=4,
    running=2,
    queued=1,
    slots=(SlotUse("p", 0, 8, 3),),
    slow=(SlowTask("t", 1, 70.0),),
)


def test_lines_are_read_back() -> None:
    assert read_line(line_of(SETUP), Setup) == SETUP
    assert read_line(line_of(STATUS), Status) == STATUS
    assert line_of(STATUS).count(b"\n") == 1
    with pytest.raises(CorruptRecord, match="Status"):
        read_line(b"{}\n", Status)


def test_there_is_no_beat_without_an_epoch() -> None:
    heart = Heart(SETUP, Status(number=0), 100.0)
    assert heart.beat(100.0, 0) is None
    heart.hear(STATUS, 100.0)
    assert heart.beat(100.0, 0) is not None
    heart.hear(Status(number=2), 100.1)
    assert heart.beat(100.1, 0) is None


def test_a_beat_tells_how_long_agentd_was_silent() -> None:
    heart = Heart(SETUP, Status(number=0), 100.0)
    heart.hear(STATUS, 101.0)
    heart.hear(STATUS, 102.0)
    beat = heart.beat(103.5, 77)
    assert beat is not None
    assert beat.loop_age_s == 2.5
    assert beat.sent_ms == 77
    assert (beat.node, beat.rack, beat.epoch) == ("n1", "rack0", 4)
    assert (beat.running, beat.queued) == (2, 1)
    assert beat.slots == STATUS.slots
    assert beat.slow == STATUS.slow


def test_beats_count_on_after_the_program_was_replaced() -> None:
    first = Heart(SETUP, STATUS, 100.0)
    numbers = [beat.number for n in range(10) if (beat := first.beat(100.0 + n / 5, 0))]
    assert numbers == sorted(set(numbers))
    second = Heart(SETUP, STATUS, 103.0)
    beat = second.beat(103.0, 0)
    assert beat is not None
    assert beat.number > numbers[-1]


def stat(*cpus: str) -> str:
    return (
        "cpu  9 9 9 9\n" + "".join(f"cpu{n} {line}\n" for n, line in enumerate(cpus)) + "intr 1\n"
    )


def test_load_is_that_of_our_cpus_between_two_samples(tmp_path: Path) -> None:
    host = write_tree(
        tmp_path,
        {
            "proc/stat": stat("0 0 0 100 0 0 0 0", "0 0 0 0 0 0 0 0", "0 0 0 100 0 0 0 0"),
            "proc/meminfo": "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  250 kB\n",
        },
    )
    sampler = LoadSampler(host, (0, 2))
    write_tree(
        tmp_path,
        {"proc/stat": stat("30 0 10 140 20 0 0 0", "999 0 0 0 0 0 0 0", "0 0 0 200 0 0 0 0")},
    )
    cpu, memory = sampler.sample()
    assert cpu == pytest.approx(40 / 200)
    assert memory == pytest.approx(0.75)
    assert sampler.sample()[0] == 0.0


def test_load_survives_a_machine_that_says_nothing(tmp_path: Path) -> None:
    sampler = LoadSampler(write_tree(tmp_path, {}), (0,))
    assert sampler.sample() == (0.0, 0.0)
