"""Which (node, domain) slots can take a pool's tasks: kept up to date on change only.

An Offers is one pool's list; its `open` part is what placement draws from, so that a
decision never looks at all nodes.
"""

from __future__ import annotations

from collections import deque

from corefleet.messages.records import Drain, NodeRegistration, PoolSpec
from corefleet.messages.wire import LoadVector, SlotUse

UNHEARD = "not heard of yet"
NOWHERE = -1
IDLE = LoadVector()


class Node:
    """One node as this controld knows it. Written by the Fleet only."""

    __slots__ = (
        "beat_age_s",
        "costs",
        "drain",
        "epoch",
        "gives",
        "gone_epoch",
        "load",
        "name",
        "queued",
        "rack",
        "registration",
        "running",
        "seen_slots",
        "slots",
        "state",
        "takes",
        "worst",
    )

    def __init__(self, registration: NodeRegistration) -> None:
        self.name = registration.node
        self.rack = registration.rack
        self.registration = registration
        self.epoch = registration.epoch
        self.gone_epoch = registration.epoch - 1
        """Attempts at this epoch and at older ones are gone."""
        self.state = UNHEARD
        self.drain: Drain | None = None
        self.load = IDLE
        """Smoothed."""
        self.worst = 0.0
        """Highest utilisation of any resource."""
        self.costs: dict[tuple[str, str], float] = {}
        """What `load` costs, by (class, kind); emptied when the load changes."""
        self.running = 0
        self.queued = 0
        self.beat_age_s = 0.0
        self.seen_slots: tuple[SlotUse, ...] = ()
        self.slots: dict[tuple[str, int], Slot] = {}
        self.takes: deque[tuple[float, Slot]] = deque()
        """Our own placements that the newest beat cannot show yet, oldest first."""
        self.gives: deque[tuple[float, Slot]] = deque()

    @property
    def draining(self) -> str:
        """Why the node is to get nothing new though it lives, '' when it may."""
        if self.drain is not None:
            return f"draining: {self.drain.reason}" if self.drain.reason else "draining"
        return "draining" if self.registration.draining else ""


class Slot:
    """The places of one pool in one domain of one node."""

    __slots__ = (
        "cooling_until",
        "domain",
        "eligible",
        "misfit",
        "node",
        "own",
        "pending",
        "pool",
        "position",
        "refusals",
        "taken",
        "total",
        "used",
    )

    def __init__(self, node: Node, pool: str, domain: int, total: int) -> None:
        self.node = node
        self.pool = pool
        self.domain = domain
        self.total = total
        self.used = 0
        """As the newest beat says."""
        self.own = 0
        """Attempts that this controld's shards have here."""
        self.pending = 0
        """Own changes since the newest beat."""
        self.misfit = ""
        """Why the pool cannot run here at all; '' when it can."""
        self.cooling_until = 0.0
        self.refusals = 0
        self.eligible = False
        self.position = NOWHERE
        """Index in the pool's open list."""
        self.taken = 0
        """Places in use: the beat's figure corrected by what we did since."""


class Offers:
    """One pool's slots over all nodes."""

    __slots__ = ("eligible", "nodes", "open", "pool", "racks", "spec")

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.spec: PoolSpec | None = None
        self.nodes: dict[str, list[Slot]] = {}
        self.open: list[Slot] = []
        """Eligible slots with a free place, in no order."""
        self.racks: dict[str, int] = {}
        """Open slots by rack."""
        self.eligible = 0
        """Slots that are eligible, full ones included."""

    def add(self, slot: Slot) -> None:
        self.nodes.setdefault(slot.node.name, []).append(slot)
        slot.misfit = misfit(self.spec, slot.node.registration)

    def remove(self, slot: Slot) -> None:
        slots = self.nodes.get(slot.node.name, [])
        if slot in slots:
            slots.remove(slot)
            if not slots:
                del self.nodes[slot.node.name]
        slot.total = 0
        self.refresh(slot)

    def set_spec(self, spec: PoolSpec | None) -> None:
        self.spec = spec
        for slots in self.nodes.values():
            for slot in slots:
                slot.misfit = misfit(spec, slot.node.registration)
                self.refresh(slot)

    def refresh(self, slot: Slot) -> bool:
        """Bring the lists up to date with `slot`; return whether it just opened."""
        eligible = slot.total > 0 and not why_not(slot)
        if eligible != slot.eligible:
            slot.eligible = eligible
            self.eligible += 1 if eligible else -1
        return self.recount(slot)

    def recount(self, slot: Slot) -> bool:
        """As `refresh`, when nothing but the counts of places changed."""
        taken = slot.used + slot.pending
        if taken < slot.own:
            taken = slot.own
        slot.taken = taken
        is_open = slot.eligible and taken < slot.total
        if is_open == (slot.position >= 0):
            return False
        if is_open:
            self._open(slot)
        else:
            self._close(slot)
        return is_open

    def _open(self, slot: Slot) -> None:
        slot.position = len(self.open)
        self.open.append(slot)
        rack = slot.node.rack
        self.racks[rack] = self.racks.get(rack, 0) + 1

    def _close(self, slot: Slot) -> None:
        last = self.open.pop()
        if last is not slot:
            self.open[slot.position] = last
            last.position = slot.position
        slot.position = NOWHERE
        rack = slot.node.rack
        left = self.racks[rack] - 1
        if left:
            self.racks[rack] = left
        else:
            del self.racks[rack]


def misfit(spec: PoolSpec | None, registration: NodeRegistration) -> str:
    """Return why a node can never run a pool, '' when it can."""
    if spec is None:
        return ""
    for key, value in spec.labels.items():
        found = registration.labels.get(key)
        if found != value:
            shown = "not set" if found is None else repr(found)
            return f"label {key} is {shown}, the pool wants {value!r}"
    if spec.model and registration.models and spec.model not in registration.models:
        return f"model {spec.model} is not there"
    return ""


def why_not(slot: Slot) -> str:
    """Return why a slot takes no task now, its free places aside; '' when it does."""
    if slot.misfit:
        return slot.misfit
    node = slot.node
    if node.state != "ready":
        return node.state
    if node.draining:
        return node.draining
    if slot.cooling_until:
        return "cooling down after a refusal"
    return ""
