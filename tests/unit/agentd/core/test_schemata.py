"""Schemata are read as each kernel writes them; shares come out in the machine's unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.schemata import (
    LEAST_SHARE,
    UNLIMITED_MBPS,
    BandwidthControl,
    Line,
    bandwidth_control,
    format_line,
    parse_schemata,
    wanted,
)
from corefleet.errors import Incompatible, InvalidInput

INTEL = BandwidthControl("MB", "percent", (0, 1), 10, 10, 100)
AMD = BandwidthControl("MB", "eighth_GBps", (0, 2), 0, 1, 2048)
MBPS = BandwidthControl("MB", "MBps", (0, 1), 10, 10, UNLIMITED_MBPS)
INTEL_INFO = {"min_bandwidth": "10\n", "bandwidth_gran": "10\n", "delay_linear": "1\n"}
AMD_INFO = {"min_bandwidth": "0\n", "bandwidth_gran": "1\n", "delay_linear": "0\n"}


@pytest.mark.parametrize(
    ("text", "resource", "values"),
    [
        ("    MB:0=  100;1=  100\n    L3:0=fffff;1=fffff\n", "MB", {0: "100", 1: "100"}),
        ("    MB:0=  100;1=  100\n    L3:0=fffff;1=00fff\n", "L3", {0: "fffff", 1: "00fff"}),
        (
            "L3:1=fffffff;122=00003c0\nMB:0=0000100;1=0000100\n",
            "L3",
            {1: "fffffff", 122: "00003c0"},
        ),
        ("MB:0=0000100;1=0000050\nMBPRI:0=0000003\n", "MB", {0: "0000100", 1: "0000050"}),
        ("MB:0=100;1=100;2=100;3=\n", "MB", {0: "100", 1: "100", 2: "100", 3: ""}),
        ("MB:0=4294967295;16=4294967295\n", "MB", {0: "4294967295", 16: "4294967295"}),
        ("L3CODE:0=ff\nL3DATA:0=0f\n", "L3DATA", {0: "0f"}),
        ("  SMBA:0=2048\n    MB:0=2048;14=512\n", "MB", {0: "2048", 14: "512"}),
        ("L2:0=ff;1=ff\n", "L2", {0: "ff", 1: "ff"}),
        ("MBMAX:0=100;1=100\n", "MBMAX", {0: "100", 1: "100"}),
    ],
)
def test_lines_of_every_kernel_are_read(text: str, resource: str, values: dict[int, str]) -> None:
    parsed = parse_schemata(text)

    assert parsed.lines[resource].values == values
    assert parsed.warnings == ()


def test_values_that_are_missing_are_no_numbers() -> None:
    line = parse_schemata("MB:0=0000100;1=\n").bandwidth()

    assert line is not None
    assert line.numbers() == {0: 100}


def test_a_group_that_is_set_up_for_locking_has_no_values() -> None:
    assert parse_schemata("L3:uninitialized\n").lines["L3"] == Line("L3", {}, initialised=False)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("garbage\n", "garbage"),
        (":0=1\n", "':0=1'"),
        ("MB:0=1\nMB:0=2\n", "twice"),
        ("MB:0=1;0=2\n", "domain 0"),
        ("MB:x=1\n", "'x=1'"),
        ("MB:1\n", "id=value"),
    ],
)
def test_nonsense_is_reported_and_survived(text: str, word: str) -> None:
    parsed = parse_schemata(f"{text}L3:0=f\n")

    assert word in parsed.warnings[0]
    assert parsed.lines["L3"].values == {0: "f"}


@given(st.text(alphabet="MBL3:;=0123456789af \n\tuninitialized", max_size=80))
def test_no_text_breaks_the_parser(text: str) -> None:
    parse_schemata(text)


@given(st.dictionaries(st.integers(0, 300), st.integers(0, UNLIMITED_MBPS), min_size=1))
def test_what_is_formatted_is_read_back(values: dict[int, int]) -> None:
    text = format_line("MB", values)

    assert text.endswith("\n")
    assert parse_schemata(text).lines["MB"].numbers() == values


def test_an_empty_line_is_never_written() -> None:
    with pytest.raises(InvalidInput, match="at least one domain"):
        format_line("MB", {})


def _control(
    info: Mapping[str, str], text: str, arch: str = "x86_64", in_mbps: bool = False
) -> BandwidthControl:
    line = parse_schemata(text).bandwidth()
    return bandwidth_control(info, [line] if line else [], arch=arch, in_mbps=in_mbps)


@pytest.mark.parametrize(
    ("info", "text", "more", "unit", "unlimited"),
    [
        (INTEL_INFO, "MB:0=100", {}, "percent", 100),
        (INTEL_INFO, "MB:0=4294967295", {}, "MBps", UNLIMITED_MBPS),
        (INTEL_INFO, "MB:0=50", {"in_mbps": True}, "MBps", UNLIMITED_MBPS),
        (AMD_INFO, "MB:0=2048", {}, "eighth_GBps", 2048),
        # Somebody throttled the root group: still no percentage.
        (AMD_INFO, "MB:0=80", {}, "eighth_GBps", 2048),
        (AMD_INFO, "MB:0=4096", {}, "eighth_GBps", 4096),
        (
            {"min_bandwidth": "1", "bandwidth_gran": "1"},
            "MB:0=0000100",
            {"arch": "aarch64"},
            "percent",
            100,
        ),
    ],
)
def test_the_unit_is_told_from_what_the_kernel_shows(
    info: dict[str, str], text: str, more: dict[str, Any], unit: str, unlimited: int
) -> None:
    control = _control(info, text, **more)

    assert (control.unit, control.unlimited, control.ids) == (unit, unlimited, (0,))


@pytest.mark.parametrize(
    ("info", "text", "word"),
    [
        ({"min_bandwidth": "0"}, "MB:0=100", "delay_linear"),
        ({**INTEL_INFO, "delay_linear": "0"}, "MB:0=100", "not linear"),
        (INTEL_INFO, "MB:0=2048", "2048"),
        ({**INTEL_INFO, "bandwidth_gran": "200"}, "MB:0=100", "steps of 200"),
        (INTEL_INFO, "L3:0=ff", "no line"),
        (INTEL_INFO, "MB:", "no line"),
    ],
)
def test_a_unit_that_is_not_sure_is_refused(info: dict[str, str], text: str, word: str) -> None:
    with pytest.raises(Incompatible, match=word):
        _control(info, text)


@pytest.mark.parametrize(
    ("control", "share", "peak", "value"),
    [
        (INTEL, 0.3, None, 30),
        (INTEL, 0.31, None, 40),
        (INTEL, 0.001, None, 10),
        (INTEL, 0.95, None, 100),
        (INTEL, None, None, 100),
        (INTEL, 1, None, 100),
        (AMD, 0.5, 100e9, 400),
        (AMD, 0.5, None, 2048),
        (AMD, 0.5, 1e15, 2048),
        (AMD, 0.001, 1e9, 1),
        (AMD, 0.5, 1.0, 1),
        (MBPS, 0.5, 100 * 2**20, 50),
        (MBPS, 0.5, None, UNLIMITED_MBPS),
        (MBPS, None, 1e9, UNLIMITED_MBPS),
    ],
)
def test_a_share_becomes_the_machines_value(
    control: BandwidthControl, share: float | None, peak: float | None, value: int
) -> None:
    assert control.value(share, peak) == value


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan"), float("inf")])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(InvalidInput, match="share"):
        INTEL.value(share, None)


@given(
    st.builds(
        lambda minimum, step: BandwidthControl("MB", "percent", (0,), minimum, step, 100),
        st.integers(0, 100),
        st.integers(1, 100),
    ),
    st.floats(0.001, 1) | st.none(),
)
def test_values_survive_the_kernels_rounding(
    control: BandwidthControl, share: float | None
) -> None:
    value = control.value(share, None)

    assert control.read_back(value) == value
    assert 0 < value <= 100
    if share is not None and share >= LEAST_SHARE:
        assert value >= min(100 * share - control.granularity, control.full)


def test_each_class_gets_its_line() -> None:
    plan = wanted(INTEL, {0: (0,), 1: (1,)}, {"batch": {0: 0.2}, "online": {1: 0.7}}, {})

    assert plan.line("MB", "batch") == "MB:0=20;1=100\n"
    assert plan.line("MB", "online") == "MB:0=100;1=70\n"
    assert plan.line("MB", "engine") is None
    assert plan.notes == ()


def test_a_domain_below_several_controls_has_its_peak_divided() -> None:
    covers = {0: (0,), 2: (0,), 4: (1,), 6: ()}

    plan = wanted(AMD, covers, {"batch": {0: 0.5}}, {0: 200e9, 1: 100e9})

    assert plan.values["batch"] == {0: 400, 2: 400, 4: 2048}


def test_a_control_above_several_domains_takes_their_largest_share() -> None:
    plan = wanted(INTEL, {0: (0, 1)}, {"batch": {0: 0.2, 1: 0.6}, "online": {0: 0.2}}, {})

    assert plan.values == {"batch": {0: 60}, "online": {0: 100}}
    assert "0.60" in plan.notes[0]
    assert "no limit" in plan.notes[1]


def test_an_absolute_unit_without_a_peak_stays_unlimited_and_says_so() -> None:
    plan = wanted(AMD, {0: (0,), 2: (1,)}, {"batch": {0: 0.5, 1: None}}, {})

    assert plan.values["batch"] == {0: 2048, 2: 2048}
    assert len(plan.notes) == 1
    assert "peak of domain 0 is not known" in plan.notes[0]


def test_only_the_ids_asked_for_are_answered() -> None:
    covers = {0: (0,), 2: (0,), 4: (1,)}

    plan = wanted(AMD, covers, {"batch": {0: 0.5, 1: 0.5}}, {0: 200e9}, only=[0, 2])

    assert plan.values["batch"] == {0: 400, 2: 400}
    assert plan.notes == ()
