"""A pool's specification as TOML text, and back."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from corefleet.config import parse, pool_from_table
from corefleet.errors import ConfigError, InvalidInput
from corefleet.ids import check_name
from corefleet.messages.records import PoolSpec

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


def to_text(spec: PoolSpec) -> str:
    """Return `spec` as TOML: one key a line, what has its default left out."""
    table = msgspec.to_builtins(spec)
    table.pop("name", None)
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items())


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
    spec = pool_from_table(name, table, "spec_toml")
    _check_rate(spec)
    return spec


def _check_rate(spec: PoolSpec) -> None:
    if spec.rate_per_s < 0 or spec.burst < 0:
        raise InvalidInput("rate_per_s", spec.rate_per_s, "0 for no limit, or more")


def _key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _string(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each) for each in value)}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return repr(value)


def _string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
