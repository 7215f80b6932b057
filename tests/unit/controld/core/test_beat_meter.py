"""Heartbeats tell how evenly they come and how clocks stand."""

from __future__ import annotations

import pytest

from controld.core.beat_meter import BeatMeter
from corefleet.messages.wire import Heartbeat


def beat(number: int, *, node: str = "n1", sent_ms: int = 1_000_000) -> Heartbeat:
    return Heartbeat(node=node, rack="r1", epoch=1, number=number, sent_ms=sent_ms)


def test_one_pair_of_beats_in_sixteen_is_measured() -> None:
    meter = BeatMeter()

    gaps = [meter.heard(beat(n), 100.0 + 0.2 * n, 1_000_000) for n in range(48)]

    assert [n for n, gap in enumerate(gaps) if gap is not None] == [1, 17, 33]
    assert gaps[17] == pytest.approx(0.2)


def test_a_pair_with_a_hole_is_not_measured() -> None:
    meter = BeatMeter()

    assert meter.heard(beat(16), 100.0, 0) is None
    assert meter.heard(beat(33), 103.4, 0) is None


@pytest.mark.parametrize("off_ms", [-500, 500])
def test_an_offset_is_what_the_quickest_beat_says(off_ms: int) -> None:
    meter = BeatMeter()
    for number, delay_ms in ((16, 90), (32, 2), (48, 40)):
        heard_ms = 1_000_000 + off_ms + delay_ms
        meter.heard(beat(number), 1.0, heard_ms)
        meter.heard(beat(number, node="n2"), 1.0, 1_000_001)

    node, offset_s = meter.worst_offset()

    assert (node, offset_s) == ("n1", pytest.approx((off_ms + 2) / 1000))
    assert meter.worst_offset() == ("", 0.0)


def test_a_node_that_is_not_ours_any_more_is_forgotten() -> None:
    meter = BeatMeter()
    meter.heard(beat(16), 1.0, 1_000_900)

    meter.forget("n1")
    meter.forget("never there")

    assert meter.worst_offset() == ("", 0.0)
    assert meter.heard(beat(17), 1.2, 1_000_900) is None
