"""What the pools of one node take from each other: the node itself, and accelerators.

A pool may want nodes to itself (PoolSpec.exclusive), and pools may name an accelerator of
which each of their tasks takes one. Only slots that this concerns are marked `shared`;
all others never come here.
"""

from __future__ import annotations

from collections.abc import Callable

from controld.core.columns import SlotColumns
from controld.core.eligibility import Node, Slot
from corefleet.messages.records import PoolSpec

SpecOf = Callable[[str], PoolSpec | None]


def mark(node: Node, slots: SlotColumns, spec_of: SpecOf) -> None:
    """Mark the slots of `node` that may be held by what others take."""
    specs = {slot.pool: spec_of(slot.pool) for slot in node.slots.values()}
    exclusive = len(specs) > 1 and any(spec and spec.exclusive for spec in specs.values())
    for slot in node.slots.values():
        spec = specs[slot.pool]
        slots.shared[slot.row] = exclusive or bool(spec and spec.accelerator)


def held(node: Node, slots: SlotColumns, spec_of: SpecOf) -> dict[tuple[str, int], str]:
    """Return why slots of `node` are held, for those that are."""
    taken: dict[str, int] = {}
    for slot in node.slots.values():
        taken[slot.pool] = taken.get(slot.pool, 0) + slots.taken_v[slot.row]
    specs = {pool: spec_of(pool) for pool in taken}
    used: dict[str, int] = {}
    for pool, count in taken.items():
        spec = specs[pool]
        if spec is not None and spec.accelerator:
            used[spec.accelerator] = used.get(spec.accelerator, 0) + count
    found = {}
    for key, slot in node.slots.items():
        why = _why(slot, node, specs, taken, used)
        if why:
            found[key] = why
    return found


def _why(
    slot: Slot,
    node: Node,
    specs: dict[str, PoolSpec | None],
    taken: dict[str, int],
    used: dict[str, int],
) -> str:
    own = specs[slot.pool]
    for pool, count in taken.items():
        if not count or pool == slot.pool:
            continue
        other = specs[pool]
        if other is not None and other.exclusive:
            return f"pool {pool} has the node to itself"
        if own is not None and own.exclusive:
            return f"pool {slot.pool} wants the node to itself, pool {pool} runs there"
    if own is not None and own.accelerator:
        there = node.registration.accelerators.get(own.accelerator, 0)
        if used[own.accelerator] >= there:
            return f"accelerator {own.accelerator}: all {there} are taken"
    return ""
