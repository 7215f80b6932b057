"""Which (node, domain) slots can take a pool's tasks: kept up to date on change only.

Node and Slot are handles: names, and rows of the arrays where their figures are. Offers is
one pool's slots; its list of open ones is what placement draws from, so that a decision
never looks at all nodes.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from controld.core.columns import FIGURES, NodeColumns, Rows, SlotColumns, ints
from controld.core.deck import Deck
from corefleet.messages.records import Drain, NodeRegistration, PoolSpec
from corefleet.messages.wire import LoadVector

UNHEARD = "not heard of yet"
NOWHERE = -1


class Node:
    """One node as this controld knows it. Written by the Fleet only."""

    __slots__ = (
        "columns",
        "drain",
        "epoch",
        "gives",
        "gone_epoch",
        "held",
        "name",
        "profile",
        "rack",
        "registration",
        "row",
        "slots",
        "state",
        "takes",
    )

    def __init__(self, registration: NodeRegistration, columns: NodeColumns, row: int) -> None:
        self.name = registration.node
        self.rack = registration.rack
        self.registration = registration
        self.columns = columns
        self.row = row
        self.profile = 0
        """Number of what pools look at in the registration: `profile_of`."""
        self.epoch = registration.epoch
        self.gone_epoch = registration.epoch - 1
        """Attempts at this epoch and at older ones are gone."""
        self.state = UNHEARD
        self.drain: Drain | None = None
        self.held: dict[tuple[str, int], str] = {}
        """Why slots are held, by (pool, domain)."""
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

    @property
    def shown_state(self) -> str:
        """The state for people: a ready node that gets nothing new is draining."""
        return "draining" if self.draining and self.state == "ready" else self.state

    @property
    def load(self) -> LoadVector:
        """Smoothed."""
        return LoadVector(**dict(zip(FIGURES, self.columns.loads[self.row].tolist(), strict=True)))

    @property
    def worst(self) -> float:
        return float(self.columns.worst[self.row])

    @property
    def running(self) -> int:
        return int(self.columns.running[self.row])

    @property
    def queued(self) -> int:
        return int(self.columns.queued[self.row])

    @property
    def beat_age_s(self) -> float:
        return float(self.columns.beat_age_s[self.row])


class Slot:
    """The places of one pool in one domain of one node; `row` is -1 once that is no more."""

    __slots__ = ("columns", "cooling_until", "domain", "node", "pool", "refusals", "row")

    def __init__(self, node: Node, pool: str, domain: int, columns: SlotColumns, row: int) -> None:
        self.node = node
        self.pool = pool
        self.domain = domain
        self.columns = columns
        self.row = row
        self.cooling_until = 0.0
        self.refusals = 0

    @property
    def total(self) -> int:
        return int(self.columns.total[self.row]) if self.row >= 0 else 0

    @property
    def taken(self) -> int:
        """Places in use: the beat's figure corrected by what we did since."""
        return int(self.columns.taken[self.row]) if self.row >= 0 else 0

    @property
    def own(self) -> int:
        """Attempts that this controld's shards have here."""
        return int(self.columns.own[self.row]) if self.row >= 0 else 0

    @property
    def position(self) -> int:
        """Index in the pool's open list, NOWHERE when the slot is not open."""
        return int(self.columns.position[self.row]) if self.row >= 0 else NOWHERE


class Offers:
    """One pool's slots over all nodes."""

    def __init__(
        self,
        pool: str,
        number: int,
        nodes: NodeColumns,
        slots: SlotColumns,
        handles: list[Slot | None],
    ) -> None:
        self.pool = pool
        self.number = number
        """In `SlotColumns.pool`."""
        self.spec: PoolSpec | None = None
        self.nodes: dict[str, list[Slot]] = {}
        self.node_columns = nodes
        self.slot_columns = slots
        self.handles = handles
        """The slot of each row, of all pools."""
        self.eligible = 0
        """Slots that are eligible, full ones included."""
        self.count = 0
        """Open slots: eligible ones with a free place."""
        self.racks: dict[int, int] = {}
        """Open slots by rack."""
        self.most = 0
        """The most places that a slot has or had."""
        self.uneven = False
        """Slots do not all have the same number of places."""
        self.surprise = 0.0
        """How far beats are from what we expected: mean square of shares of places."""
        self.decks: dict[tuple[str, str], Deck] = {}
        """Samples drawn in advance, by task kind and class."""
        self._open = np.zeros(16, np.int32)
        self.open_v = ints(self._open)

    @property
    def open(self) -> list[Slot]:
        """The open slots, in no order. Looks at all of them."""
        return [slot for row in self.open_rows() if (slot := self.handles[row]) is not None]

    def open_rows(self) -> Rows:
        """Return the rows of the open slots, in no order."""
        return self._open[: self.count].astype(np.intp)

    def rows_at(self, positions: Rows) -> Rows:
        """Return the rows of the open slots at `positions` of the list."""
        return self._open[positions].astype(np.intp)

    def add(self, slot: Slot) -> None:
        self.nodes.setdefault(slot.node.name, []).append(slot)

    def remove(self, slot: Slot) -> None:
        """The slot is no more."""
        slots = self.nodes[slot.node.name]
        slots.remove(slot)
        if not slots:
            del self.nodes[slot.node.name]
        self.slot_columns.total[slot.row] = 0
        self.refresh(slot.row)
        # Its row may soon be another pool's.
        self.decks.clear()

    def resized(self, total: int) -> None:
        """A slot has `total` places now."""
        if total and total != self.most:
            self.uneven = self.uneven or self.most > 0
            self.most = max(self.most, total)

    def refresh(self, row: int) -> bool:
        """Bring the lists up to date with a slot; return whether it just opened."""
        slots = self.slot_columns
        eligible = (
            slots.fits_v[row]
            and self.node_columns.ready_v[slots.node_v[row]]
            and not slots.cooling_v[row]
            and not slots.held_v[row]
            and slots.total_v[row] > 0
        )
        if eligible != slots.eligible_v[row]:
            slots.eligible_v[row] = eligible
            self.eligible += 1 if eligible else -1
        return self.reopen(row)

    def reopen(self, row: int) -> bool:
        """As `refresh`, when nothing but the counts of places changed."""
        slots = self.slot_columns
        is_open = slots.eligible_v[row] and slots.taken_v[row] < slots.total_v[row]
        if is_open == (slots.position_v[row] >= 0):
            return False
        if is_open:
            self._open_slot(row)
        else:
            self._close_slot(row)
        return bool(is_open)

    def refresh_all(self) -> bool:
        """As `refresh`, for all slots at once; return whether any opened."""
        slots, nodes = self.slot_columns, self.node_columns
        rows = slots.of_pool(self.number)
        eligible = slots.fits[rows] & nodes.ready[slots.node[rows]] & (slots.total[rows] > 0)
        eligible &= ~slots.cooling[rows] & ~slots.held[rows]
        slots.eligible[rows] = eligible
        self.eligible = int(np.count_nonzero(eligible))
        is_open = eligible & (slots.taken[rows] < slots.total[rows])
        opened = bool(np.any(is_open & (slots.position[rows] < 0)))
        found = rows[is_open]
        self.count = len(found)
        self._reserve(self.count)
        self._open[: self.count] = found
        slots.position[rows] = NOWHERE
        slots.position[found] = np.arange(self.count)
        racks, counts = np.unique(nodes.rack[slots.node[found]], return_counts=True)
        self.racks = dict(zip(racks.tolist(), counts.tolist(), strict=True))
        return opened

    def _reserve(self, count: int) -> None:
        if count > len(self._open):
            larger = np.zeros(max(count, 2 * len(self._open)), np.int32)
            larger[: len(self._open)] = self._open
            self._open = larger
            self.open_v = ints(larger)

    def _open_slot(self, row: int) -> None:
        count = self.count
        self._reserve(count + 1)
        self.open_v[count] = row
        self.slot_columns.position_v[row] = count
        self.count = count + 1
        rack = self.node_columns.rack_v[self.slot_columns.node_v[row]]
        self.racks[rack] = self.racks.get(rack, 0) + 1

    def _close_slot(self, row: int) -> None:
        positions = self.slot_columns.position_v
        position = positions[row]
        self.count -= 1
        last = self.open_v[self.count]
        self.open_v[position] = last
        positions[last] = position
        positions[row] = NOWHERE
        rack = self.node_columns.rack_v[self.slot_columns.node_v[row]]
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
    if spec.arch and registration.arch != spec.arch:
        return f"arch is {registration.arch or 'not known'}, the pool wants {spec.arch}"
    missing = [name for name in spec.features if name not in registration.features]
    if missing:
        return f"CPU features are missing: {', '.join(missing)}"
    if spec.accelerator and not registration.accelerators.get(spec.accelerator):
        return f"accelerator {spec.accelerator} is not there"
    if spec.model and registration.models and spec.model not in registration.models:
        return f"model {spec.model} is not there"
    return ""


def profile_of(registration: NodeRegistration) -> tuple[object, ...]:
    """Return all that `misfit` looks at: nodes of one profile fit the same pools."""
    return (
        registration.arch,
        registration.features,
        tuple(sorted(registration.labels.items())),
        registration.models,
        tuple(sorted(label for label, count in registration.accelerators.items() if count)),
    )


def why_not(slot: Slot, spec: PoolSpec | None) -> str:
    """Return why a slot takes no task now, its free places aside; '' when it does."""
    node = slot.node
    unfit = misfit(spec, node.registration)
    if unfit:
        return unfit
    if node.state != "ready":
        return node.state
    if node.draining:
        return node.draining
    if slot.cooling_until:
        return "cooling down after a refusal"
    return node.held.get((slot.pool, slot.domain), "")
