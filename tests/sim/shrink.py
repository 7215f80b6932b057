"""Makes the plan of a failing seed as small as it can be and still fail in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from tests.sim.plan import Fault, Plan, Work

T = TypeVar("T")

Fails = Callable[[Plan], bool]


def shrink(plan: Plan, fails: Fails, told: Callable[[str], None] = lambda line: None) -> Plan:
    """Return a smaller plan that still fails: fewer faults, then less work, then again."""
    while True:
        smaller = _less_work(_fewer_faults(plan, fails), fails)
        told(f"{len(smaller.faults)} faults, {len(smaller.work)} tasks")
        if smaller == plan:
            return plan
        plan = smaller


def _fewer_faults(plan: Plan, fails: Fails) -> Plan:
    def with_faults(kept: tuple[Fault, ...]) -> Plan:
        return msgspec.structs.replace(plan, faults=kept)

    return with_faults(_fewer(plan.faults, lambda kept: fails(with_faults(kept))))


def _less_work(plan: Plan, fails: Fails) -> Plan:
    def with_work(kept: tuple[Work, ...]) -> Plan:
        return msgspec.structs.replace(plan, work=kept)

    return with_work(_fewer(plan.work, lambda kept: fails(with_work(kept))))


def _fewer(items: tuple[T, ...], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Drop parts of `items`, large ones first, as long as it still fails without them."""
    size = max(1, len(items) // 2)
    while items:
        start = 0
        while start < len(items):
            kept = _without(items, start, size)
            if fails(kept):
                items = kept
            else:
                start += size
        if size == 1:
            break
        size //= 2
    return items


def _without(items: Sequence[T], start: int, size: int) -> tuple[T, ...]:
    return (*items[:start], *items[start + size :])
