"""What a check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Level = Literal["ok", "skipped", "warning", "error"]
"""`error`: it does not work; `warning`: it works worse than it could, or not for long."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check. Whatever is wrong says what to do."""

    check: str
    level: Level
    what: str
    do: str = ""

    def __post_init__(self) -> None:
        if (self.level in ("warning", "error")) != bool(self.do):
            raise ValueError(f"{self.check}: {self.level} with {self.do!r} to do")


def ok(check: str, what: str) -> Finding:
    return Finding(check=check, level="ok", what=what)


def skipped(check: str, why: str) -> Finding:
    """The check could not be made, which is no proof of anything."""
    return Finding(check=check, level="skipped", what=why)


def warning(check: str, what: str, do: str) -> Finding:
    return Finding(check=check, level="warning", what=what, do=do)


def error(check: str, what: str, do: str) -> Finding:
    return Finding(check=check, level="error", what=what, do=do)


def worst(findings: Sequence[Finding]) -> Level:
    """Return the gravest level among `findings`, `ok` when there are none."""
    order: tuple[Level, ...] = ("ok", "skipped", "warning", "error")
    return max((each.level for each in findings), key=order.index, default="ok")
