"""Heartbeats tell how evenly they come and how clocks stand."""

from __future__ import annotations

import pytest

from controld.core.beat_meter import BeatMeter
from corefleet.messages.wire import Heartbeat


def beat(*, node: str = "n1", epoch: int = 1, number: int = 7) -> Heartbeat:
    return Heartbeat(node=node, rack="r1", epoch=epoch, number=number, sent_ms=1_000_000)


def hear(meter: BeatMeter, beats: int, *, node: str = "n1", wall_ms: int = 1_000_000) -> None:
    for _ in range(beats):
        meter.heard(beat(node=node), 1.0, wall_ms)


def test_one_pair_of_beats_in_sixteen_is_measured() -> None:
    meter = BeatMeter()

    # A real heartbeat counts tenths of seconds: two on from one beat to the next.
    gaps = [meter.heard(beat(number=2 * n), 100.0 + 0.2 * n, 1_000_000) for n in range(1, 49)]

    assert [n for n, gap in enumerate(gaps, 1) if gap is not None] == [17, 33]
    assert gaps[16] == pytest.approx(0.2)


def test_the_silence_between_two_lives_of_a_node_is_not_measured() -> None:
    meter = BeatMeter()
    hear(meter, 16)

    assert meter.heard(beat(epoch=2), 60.0, 0) is None


@pytest.mark.parametrize("off_ms", [-500, 500])
def test_an_offset_is_what_the_quickest_beat_says(off_ms: int) -> None:
    meter = BeatMeter()
    for delay_ms in (90, 2, 40):
        hear(meter, 16, wall_ms=1_000_000 + off_ms + delay_ms)
        hear(meter, 16, node="n2", wall_ms=1_000_001)

    node, offset_s = meter.worst_offset()

    assert node == "n1"
    assert offset_s == pytest.approx((off_ms + 2) / 1000)
    assert meter.worst_offset() == ("", 0.0)


def test_a_node_that_is_not_ours_any_more_is_forgotten() -> None:
    meter = BeatMeter()
    hear(meter, 16, wall_ms=1_000_900)

    meter.forget("n1")
    meter.forget("never there")

    assert meter.worst_offset() == ("", 0.0)
    assert meter.heard(beat(), 1.2, 1_000_900) is None
