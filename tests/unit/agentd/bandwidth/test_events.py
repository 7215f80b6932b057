"""How counters and their events are read from the kernel's description."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.bandwidth.events import (
    DEVICES,
    Device,
    Field,
    bytes_per_count,
    encode,
    parse_format,
    read_device,
)
from corefleet.errors import InvalidInput
from tests.unit.agentd.machines import write_tree

DATA_FABRIC = Device(
    "amd_df",
    11,
    (0,),
    {
        "event": parse_format("config:0-7,32-35,59-60\n", "event"),
        "umask": parse_format("config:8-15", "umask"),
        "filter": parse_format("config1:3", "filter"),
    },
)


def test_a_value_is_spread_over_the_ranges_of_its_format() -> None:
    event = encode(DATA_FABRIC, "event=0x1c7,umask=0x38", "x")
    assert event.config == 0xC7 | 0x38 << 8 | 1 << 32
    assert event.kind == 11
    assert event.name == "amd_df/x"


def test_a_term_without_a_value_is_one_and_a_register_may_be_named() -> None:
    assert encode(DATA_FABRIC, "filter", "x").config1 == 8
    assert encode(DATA_FABRIC, "config=0xffff,config2=0x5", "x").config == 0xFFFF
    assert encode(DATA_FABRIC, "config=0xffff,config2=0x5", "x").config2 == 5


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ("event=0x4000", "14 bits"),
        ("event=-1", "14 bits"),
        ("edge=1", "terms among event, filter, umask"),
        ("event=?", "numbers as values"),
    ],
)
def test_terms_that_cannot_be_counted_are_refused(terms: str, expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        encode(DATA_FABRIC, terms, "x")


@pytest.mark.parametrize("text", ["", "config", "config:", "config:7-0", "config:64", "rip:0-7"])
def test_a_format_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="a register"):
        parse_format(text, "f")


@given(st.permutations(range(64)), st.integers(1, 64), st.data())
def test_a_value_can_be_read_back_from_its_bits(
    order: list[int], width: int, data: st.DataObject
) -> None:
    bits = tuple(order[:width])
    value = data.draw(st.integers(0, (1 << width) - 1))
    device = Device("d", 1, (0,), {"event": Field("config", bits)})
    config = encode(device, f"event={value:#x}", "x").config
    assert sum((config >> bit & 1) << index for index, bit in enumerate(bits)) == value
    assert config.bit_count() == value.bit_count()


def test_a_device_is_read_with_its_events_and_scales(tmp_path: Path) -> None:
    base = f"{DEVICES}/uncore_imc_0"
    host = write_tree(
        tmp_path,
        {
            f"{base}/type": "24\n",
            f"{base}/cpumask": "0,28\n",
            f"{base}/format/event": "config:0-7\n",
            f"{base}/events/cas_count_read": "event=0x04,umask=0x03\n",
            f"{base}/events/cas_count_read.scale": "6.103515625e-5\n",
            f"{base}/events/cas_count_read.unit": "MiB\n",
            f"{base}/events/clockticks": "event=0xff\n",
            f"{base}/events/odd.scale": "nan\n",
            f"{base}/events/joules.scale": "1\n",
            f"{base}/events/joules.unit": "Joules\n",
        },
    )
    device = read_device(host, "uncore_imc_0")
    assert device is not None
    assert (device.kind, device.cpus) == (24, (0, 28))
    assert sorted(device.events) == ["cas_count_read", "clockticks"]
    assert bytes_per_count(host, "uncore_imc_0", "cas_count_read", 1.0) == 64.0
    assert bytes_per_count(host, "uncore_imc_0", "clockticks", 32.0) == 32.0
    for event in ("odd", "joules"):
        with pytest.raises(InvalidInput, match=event):
            bytes_per_count(host, "uncore_imc_0", event, 1.0)


@pytest.mark.parametrize("kind", ["", "-\n"])
def test_a_device_that_makes_no_sense_is_none(tmp_path: Path, kind: str) -> None:
    base = f"{DEVICES}/amd_df"
    files = {f"{base}/cpumask": "0\n", f"{base}/type": kind}
    assert read_device(write_tree(tmp_path, files), "amd_df") is None


def test_a_device_without_a_reading_cpu_is_none(tmp_path: Path) -> None:
    host = write_tree(tmp_path, {f"{DEVICES}/amd_df/type": "11\n"})
    assert read_device(host, "amd_df") is None
