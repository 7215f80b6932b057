"""Pools as TOML text: what is written can be read again, and errors name the key."""

from __future__ import annotations

import pytest

from controld.api.spec_text import from_text
from corefleet.config import pool_text
from corefleet.errors import ConfigError, InvalidInput
from corefleet.messages.records import PoolSpec, ToolSpec

FULL = PoolSpec(
    name="support",
    model="qwen",
    prompt='Say "hello"\n\ttwice, \\ and in Ünïcode \x7f',
    tools=(ToolSpec(name="calc"), ToolSpec(name="mail", source="my.tools:mail", at_most_once=True)),
    temperature=0.25,
    labels={"zone.eu/a b": "x", "disk": "ssd"},
    python_path=("/srv/agents",),
    slots=16,
    rate_per_s=12.5,
)


def test_what_is_written_can_be_read_again() -> None:
    assert from_text("support", pool_text(FULL)) == FULL


def test_defaults_are_left_out() -> None:
    assert pool_text(PoolSpec(name="p", model="qwen")) == 'model = "qwen"\n'


def test_a_table_of_the_pools_name_is_accepted() -> None:
    assert from_text("p", '[p]\nmodel = "qwen"\n') == PoolSpec(name="p", model="qwen")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("model = ", "not TOML"),
        ('modle = "qwen"', "did you mean `model`"),
        ('model = "qwen"\nslots = "8"', "p.slots"),
        ('model = "qwen"\nslots = 0', "p.slots"),
        ("slots = 4", "p.model"),
        ('agent = "nonsense"', "module:Class"),
    ],
)
def test_errors_name_the_key(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match="spec_toml") as caught:
        from_text("p", text)
    assert part in str(caught.value)


def test_the_name_must_be_a_name() -> None:
    with pytest.raises(InvalidInput, match="name: "):
        from_text("a b", 'model = "qwen"')


def test_a_rate_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="rate_per_s"):
        from_text("p", 'model = "qwen"\nrate_per_s = -1.0')
