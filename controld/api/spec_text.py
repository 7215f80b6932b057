"""A pool's specification as TOML text, and back."""

from __future__ import annotations

from typing import Any

from corefleet.config import parse, pool_from_table
from corefleet.errors import ConfigError
from corefleet.ids import check_name
from corefleet.messages.records import PoolSpec


def from_text(name: str, text: str) -> PoolSpec:
    """Return the pool `name` that TOML `text` describes.

    The text holds the pool's keys at its top, or one table `[<name>]` of them.
    Raises InvalidInput for the name, ConfigError for the text.
    """
    check_name("name", name)
    table = parse(text, dict[str, Any], "spec_toml")
    if set(table) == {name} and isinstance(table[name], dict):
        table = table[name]
    if not table:
        raise ConfigError(f"spec_toml: `{name}`: empty; expected the keys of a pool")
    return pool_from_table(name, table, "spec_toml")
