"""CPU lists, as the kernel writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.cpulist import format_list, parse_list
from corefleet.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", ()),
        ("\n", ()),
        ("0", (0,)),
        ("0-3,8\n", (0, 1, 2, 3, 8)),
        ("5,1-2", (1, 2, 5)),
        ("0-7:2/4", (0, 1, 4, 5)),
        ("3,3,2-3", (2, 3)),
    ],
)
def test_reads_what_the_kernel_writes(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_list(text, "cpus") == numbers


@pytest.mark.parametrize("text", ["a", "3-1", "0-99999999", "1-2-3", "-1", "0-3:0/4", "0-3:5/4"])
def test_refuses_nonsense_and_names_the_field(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^cpus: "):
        parse_list(text, "cpus")


@given(st.sets(st.integers(0, 300)))
def test_formats_what_it_reads_back(numbers: set[int]) -> None:
    assert parse_list(format_list(numbers), "cpus") == tuple(sorted(numbers))


def test_formats_ranges() -> None:
    assert format_list([8, 0, 1, 2, 3]) == "0-3,8"
    assert format_list([]) == ""
