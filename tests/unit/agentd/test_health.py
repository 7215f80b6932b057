"""When a node is unwell, and when it should drain: the pure part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.health import TRANSITIONS, Health
from agentd.core.health_samples import (
    BeatsSent,
    ClockState,
    DiskState,
    HealthSettings,
    HealthVerdict,
    MemoryErrors,
    Phase,
    Sample,
    Throttled,
)
from corefleet.errors import InvalidInput

HOUR_S = 3600.0
SETTINGS = HealthSettings(drain_after_s=60, well_after_s=300)


def disk(used: float) -> DiskState:
    return DiskState("data_dir", "/d", used)


def run(health: Health, samples: list[tuple[float, Sample]]) -> list[Phase]:
    return [health.take([sample], now).phase for now, sample in samples]


def test_a_bad_signal_is_watched_then_drains_and_is_well_after_a_while() -> None:
    health = Health(SETTINGS)
    phases = run(
        health,
        [
            (0, disk(0.5)),
            (10, disk(0.96)),
            (60, disk(0.96)),
            (70, disk(0.96)),
            (80, disk(0.5)),
            (370, disk(0.5)),
            (380, disk(0.5)),
        ],
    )
    assert phases == ["ok", "watching", "watching", "draining", "draining", "draining", "ok"]


def test_between_the_limits_everything_stays_as_it_is() -> None:
    health = Health(SETTINGS)
    assert run(health, [(0, disk(0.92)), (10, disk(0.97)), (20, disk(0.92))]) == [
        "ok",
        "watching",
        "watching",
    ]
    # Long enough, but not bad at this moment: no drain for a single peak.
    assert health.take([disk(0.92)], 200).phase == "watching"
    assert health.take([disk(0.97)], 210).phase == "draining"
    assert health.take([disk(0.92)], 9_000).phase == "draining"


def test_a_relapse_begins_the_time_of_recovery_anew() -> None:
    health = Health(SETTINGS)
    run(health, [(0, disk(0.97)), (60, disk(0.97)), (100, disk(0.1)), (390, disk(0.92))])
    assert run(health, [(410, disk(0.1)), (700, disk(0.1)), (710, disk(0.1))]) == [
        "draining",
        "draining",
        "ok",
    ]


def test_a_watched_signal_that_gets_well_is_ok_at_once() -> None:
    assert run(Health(SETTINGS), [(0, disk(0.97)), (10, disk(0.1))]) == ["watching", "ok"]


def test_the_lines_say_what_is_wrong_and_vanish_with_it() -> None:
    health = Health(SETTINGS)
    verdict = health.take([disk(0.97)], 0)
    assert verdict.unwell == ("data_dir /d: 97% of its space or inodes is used",)
    assert not verdict.should_drain
    assert health.take([disk(0.1)], 10) == HealthVerdict("ok")


def test_numbers_that_move_are_no_news_but_a_new_phase_is() -> None:
    health = Health(SETTINGS)
    verdict = health.take([disk(0.96)], 0)
    assert health.take([disk(0.97)], 10) == verdict
    assert health.take([disk(0.98)], 60).unwell == (
        "data_dir /d: 98% of its space or inodes is used",
    )


def memory(corrected: int, uncorrected: int | None = 0, name: str = "mc0") -> MemoryErrors:
    return MemoryErrors(name, corrected, uncorrected)


def test_corrected_errors_count_from_the_first_look_and_within_the_window() -> None:
    health = Health(SETTINGS)
    phases = run(
        health,
        [
            (0, memory(5000)),
            (HOUR_S, memory(5099)),
            (2 * HOUR_S, memory(5100)),
            (2 * HOUR_S + 60, memory(5100)),
            (25 * HOUR_S, memory(5100)),
            (25 * HOUR_S + 300, memory(5100)),
        ],
    )
    assert phases == ["ok", "ok", "watching", "draining", "draining", "ok"]


def test_each_memory_controller_is_judged_by_itself() -> None:
    health = Health(SETTINGS)
    for now, errors in ((0, 0), (10, 60)):
        verdict = health.take([memory(errors), memory(errors, name="mc1")], now)
        assert verdict.phase == "ok"
    verdict = health.take([memory(60), memory(120, name="mc1")], 20)
    assert verdict.unwell == ("memory controller mc1: 120 corrected errors within 24 h",)


def test_a_count_that_was_reset_is_not_taken_for_errors() -> None:
    assert run(Health(SETTINGS), [(0, memory(90)), (10, memory(0)), (20, memory(90))]) == ["ok"] * 3


def test_an_uncorrected_error_drains_at_once_until_the_count_is_reset() -> None:
    health = Health(SETTINGS)
    verdict = health.take([memory(0, uncorrected=1)], 0)
    assert verdict.should_drain
    assert verdict.unwell == ("memory controller mc0: 1 uncorrected errors",)
    assert health.take([memory(0, uncorrected=1)], 9_000).should_drain
    assert health.take([memory(0)], 9_010).should_drain
    assert not health.take([memory(0)], 9_310).should_drain


def test_a_controller_that_does_not_tell_one_count_is_judged_by_the_other() -> None:
    assert Health().take([memory(0, uncorrected=None)], 0).phase == "ok"
    assert Health().take([MemoryErrors("mc0", None, 2)], 0).should_drain


def test_throttling_is_the_rate_of_a_packages_busiest_counter() -> None:
    health = Health(SETTINGS)

    def heat(package: int, core: int) -> Throttled:
        return Throttled("1", {"cpu0/package": package, "cpu1/core": core})

    # The larger count stands still; the smaller one rises.
    phases = run(health, [(0, heat(9000, 0)), (60, heat(9000, 29)), (120, heat(9000, 30))])
    assert phases == ["ok", "ok", "watching"]
    assert health.take([heat(9000, 30)], 180).unwell == (
        "package 1: throttled by heat 6.0 times a minute",
    )
    assert health.take([heat(9000, 30)], 420).phase == "draining"
    assert health.take([heat(9000, 30)], 720).phase == "ok"


def beats(*sent: int) -> list[tuple[float, Sample]]:
    return [(10.0 * place, BeatsSent(count, 0.2)) for place, count in enumerate(sent)]


def test_beats_that_do_not_go_out_in_time_are_jitter() -> None:
    health = Health(SETTINGS)
    # 50 are due in 10 s; of the last three intervals' 150, 110 went out.
    assert run(health, beats(0, 50, 100, 135, 160))[-2:] == ["ok", "watching"]
    assert health.take([], 50).unwell == ()


def test_beats_on_time_are_well() -> None:
    assert set(run(Health(SETTINGS), beats(*range(0, 1000, 50)))) == {"ok"}


def test_a_node_that_sends_no_beat_at_all_is_not_healths_matter() -> None:
    silent = beats(0, 0, 20, 70, *[120] * 20, 140, 190, 240)
    assert set(run(Health(SETTINGS), silent)) == {"ok"}


def test_a_file_system_that_cannot_be_written_or_asked_drains_at_once() -> None:
    for state, words in (
        (DiskState("data_dir", "/d", 0.1, read_only=True), "data_dir /d: is read-only"),
        (DiskState("run_dir", "/r", error="gone"), "run_dir /r: cannot be asked: gone"),
    ):
        verdict = Health(SETTINGS).take([state], 0)
        assert verdict.should_drain
        assert verdict.unwell == (words,)


def test_a_clock_that_nothing_disciplines_is_told_but_drains_only_if_asked() -> None:
    lone = ClockState(synchronised=False, error_s=16.0)
    calm, strict = Health(SETTINGS), Health(HealthSettings(drain_unsynchronised=True))
    assert run(calm, [(0, lone), (9_000, lone)]) == ["watching", "watching"]
    assert calm.take([lone], 9_010).unwell == ("clock: nothing disciplines it (STA_UNSYNC)",)
    assert run(strict, [(0, lone), (60, lone)]) == ["watching", "draining"]


def test_a_disciplined_clock_that_is_far_off_drains() -> None:
    off = ClockState(synchronised=True, error_s=0.7)
    assert run(Health(SETTINGS), [(0, off), (60, off)]) == ["watching", "draining"]


def test_a_signal_that_vanishes_counts_as_good() -> None:
    health = Health(SETTINGS)
    run(health, [(0, disk(0.97)), (60, disk(0.97))])
    assert health.take([], 70).should_drain
    assert health.take([], 370) == HealthVerdict("ok")


def test_what_is_not_judged_is_handed_on() -> None:
    assert Health().take([], 0, ("heat: no",)).not_judged == ("heat: no",)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"disk_good_share": 0.95}, "disk_good_share"),
        ({"clock_good_s": -1.0}, "clock_good_s"),
        ({"corrected_bad": 10.0}, "corrected_good"),
        ({"throttle_good_per_minute": 7.0}, "throttle_good_per_minute"),
    ],
)
def test_limits_in_the_wrong_order_are_refused(changed: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        HealthSettings(**changed)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(0.1, 120), st.one_of(st.none(), st.floats(0, 1))), max_size=60))
def test_the_phase_moves_by_the_table_and_keeps_its_times(
    steps: list[tuple[float, float | None]],
) -> None:
    health, now, before = Health(SETTINGS), 0.0, "ok"
    bad_since = good_since = None
    for pause_s, used in steps:
        now += pause_s
        phase = health.take([] if used is None else [disk(used)], now).phase
        if phase != before:
            assert (before, phase) in TRANSITIONS
        good = used is None or used < SETTINGS.disk_good_share
        good_since = (now if good_since is None else good_since) if good else None
        bad_since = None if good else (now if bad_since is None else bad_since)
        if before == "watching" and phase == "draining":
            assert bad_since is not None
            assert now - bad_since >= SETTINGS.drain_after_s
        if before == "draining" and phase == "ok":
            assert good_since is not None
            assert now - good_since >= SETTINGS.well_after_s
        before = phase
    if steps:
        health.take([], now + 1)
        # A second more: sums of such floats fall short of what they should be.
        assert health.take([], now + 2 + SETTINGS.well_after_s).phase == "ok"
