"""Times on the command line: `90`, `90s`, `10m`, `1h30m`."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS_S = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")


class Duration(click.ParamType[int]):
    """A time of at least one second; seconds to the program."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _PARTS.fullmatch(str(value))
        counts = [int(part or 0) for part in found.groups()] if found else []
        seconds = sum(n * unit for n, unit in zip(counts, _UNITS_S.values(), strict=False))
        if not seconds:
            self.fail(f"{value!r}: a time like 30s, 10m or 1h30m is expected", param, ctx)
        return seconds


def shown(seconds: float) -> str:
    """Return `seconds` as it can be typed, to the second."""
    left, parts = round(seconds), []
    for unit, size in _UNITS_S.items():
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
