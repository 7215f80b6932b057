"""The arrays, the handles and the pools' lists, kept in step whatever changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from controld.core.columns import NodeColumns, Rows, SlotColumns
from controld.core.eligibility import Node, Offers, Slot, misfit, profile_of
from controld.core.score import crowd_cost, crowd_costs, place_cost, place_costs
from controld.core.sharing import held, mark
from corefleet.messages.records import NodeRegistration, PoolSpec


@dataclass(slots=True, frozen=True)
class Group:
    """All slots of some nodes."""

    rows: Rows
    node_of: Rows
    """Of each slot, the node's row."""
    touched: Rows
    """The nodes' rows, each once."""
    index: Rows
    """Of each slot, where its node is in `touched`."""


class Places:
    """All slots of all nodes. `opened` is called with each pool of which a slot opens."""

    def __init__(self, opened: Callable[[str], None]) -> None:
        self.nodes = NodeColumns()
        self.slots = SlotColumns()
        self.offers: dict[str, Offers] = {}
        self.by_number: list[Offers] = []
        self.handles: list[Slot | None] = []
        self._opened = opened
        self._rack_numbers: dict[str, int] = {}
        self._profiles: dict[tuple[object, ...], int] = {}
        self._pools: dict[str, PoolSpec] = {}
        self._sharing = False
        """There is or was a pool that takes from others what their slots need."""
        self.changes = 0
        """Counts what changed but by digests (`NodeColumns.version`): slots, what is true of
        them, whether they are open, and whether they run anything of ours."""

    # Nodes and slots come and go.

    def add_node(self, registration: NodeRegistration) -> Node:
        """Return a node without slots, not heard of yet."""
        rack = self._rack_numbers.setdefault(registration.rack, len(self._rack_numbers))
        node = Node(registration, self.nodes, self.nodes.take(rack))
        self._profile(node)
        return node

    def drop_node(self, node: Node) -> None:
        """The node is no more; its handles stay, without rows."""
        self.changes += 1
        for slot in node.slots.values():
            self.offers[slot.pool].remove(slot)
            self.handles[slot.row] = None
            self.slots.free(slot.row)
            slot.row = -1
        self.nodes.free(node.row)

    def add_slot(self, node: Node, pool: str, domain: int, total: int) -> Slot:
        """Add a slot, closed until it is refreshed."""
        offers = self.offers_of(pool)
        row = self.slots.take(node.row, offers.number)
        if row == len(self.handles):
            self.handles.append(None)
        slot = self.handles[row] = Slot(node, pool, domain, self.slots, row)
        node.slots[(pool, domain)] = slot
        offers.add(slot)
        self.slots.fits[row] = not misfit(offers.spec, node.registration)
        self.resize(slot, total, 0)
        return slot

    def resize(self, slot: Slot, total: int, used: int) -> None:
        """Set what a slot offers and what is used of it; `freshen` makes it count."""
        self.slots.total_v[slot.row] = total
        self.slots.used_v[slot.row] = used
        self.by_number[self.slots.pool_v[slot.row]].resized(total)

    def offers_of(self, pool: str) -> Offers:
        """Return a pool's slots, making the list at its first mention."""
        offers = self.offers.get(pool)
        if offers is None:
            number = len(self.by_number)
            offers = Offers(pool, number, self.nodes, self.slots, self.handles)
            offers.spec = self._pools.get(pool)
            self.offers[pool] = offers
            self.by_number.append(offers)
        return offers

    # What is true of them changes.

    def set_pools(self, pools: dict[str, PoolSpec]) -> None:
        """Take all pools of the cluster; only those that changed cost anything."""
        changed = [
            self.offers_of(name)
            for name in self.offers.keys() | pools.keys()
            if pools.get(name) != self._pools.get(name)
        ]
        self._pools = dict(pools)
        self.changes += 1
        touched: dict[str, Node] = {}
        self._sharing = self._sharing or any(map(_shares, pools.values()))
        for offers in changed:
            old, offers.spec = offers.spec, pools.get(offers.pool)
            self._refit(offers)
            if _shares(old) or _shares(offers.spec):
                for slots in offers.nodes.values():
                    touched[slots[0].node.name] = slots[0].node
        for node in touched.values():
            mark(node, self.slots, self._pools.get)
            self.settle(node)
        for offers in changed:
            if offers.refresh_all():
                self._opened(offers.pool)

    def reregistered(self, node: Node) -> None:
        """The node's registration changed within its epoch."""
        self._profile(node)
        for slot in node.slots.values():
            unfit = misfit(self.offers[slot.pool].spec, node.registration)
            self.slots.fits[slot.row] = not unfit
        self.freshen(node)

    def set_ready(self, node: Node) -> None:
        """The node's state changed, or it drains, or no longer."""
        ready = node.state == "ready" and not node.draining
        if ready != self.nodes.ready_v[node.row]:
            self.nodes.ready_v[node.row] = ready
            self._refresh(slot.row for slot in node.slots.values())

    def freshen(self, node: Node) -> None:
        """Bring everything up to date with the node's state, registration and slots."""
        slots, nodes, row = self.slots, self.nodes, node.row
        nodes.ready_v[row] = node.state == "ready" and not node.draining
        places = on_node = 0
        for slot in node.slots.values():
            at = slot.row
            total = slots.total_v[at]
            taken = max(slots.used_v[at] + slots.pending_v[at], slots.own_v[at])
            slots.taken_v[at] = taken
            slots.cost_v[at] = place_cost(taken, total, nodes.queued_v[row])
            places += total
            on_node += taken
        nodes.places_v[row], nodes.taken_v[row] = places, on_node
        nodes.crowd_v[row] = crowd_cost(on_node, places)
        if self._sharing:
            mark(node, slots, self._pools.get)
            self.settle(node)
        self._refresh([slot.row for slot in node.slots.values()])

    def settle(self, node: Node) -> None:
        """Hold the slots for which the node has nothing left, and let others go."""
        found = held(node, self.slots, self._pools.get)
        if found == node.held:
            return
        node.held = found
        for key, slot in node.slots.items():
            is_held = key in found
            if is_held != self.slots.held_v[slot.row]:
                self.slots.held_v[slot.row] = is_held
                self._refresh((slot.row,))

    # Counts.

    def count(self, row: int, own: int, pending: int) -> None:
        """Our own attempts on a slot became more by `own`, what beats cannot show by `pending`."""
        slots, nodes = self.slots, self.nodes
        taken = slots.pending_v[row] + pending
        slots.pending_v[row] = taken
        taken += slots.used_v[row]
        owned = slots.own_v[row] + own
        if own:
            slots.own_v[row] = owned
            if owned == 0 or owned == own:
                self.changes += 1
        if taken < owned:
            taken = owned
        before = slots.taken_v[row]
        if taken == before:
            return
        slots.taken_v[row] = taken
        node, total = slots.node_v[row], slots.total_v[row]
        nodes.taken_v[node] = on_node = nodes.taken_v[node] + taken - before
        nodes.crowd_v[node] = crowd_cost(on_node, nodes.places_v[node])
        slots.cost_v[row] = place_cost(taken, total, nodes.queued_v[node])
        if slots.shared_v[row]:
            self.settle(self._slot(row).node)
        if (taken < total) != (before < total):
            offers = self.by_number[slots.pool_v[row]]
            self.changes += 1
            if offers.reopen(row):
                self._opened(offers.pool)

    def group(self, slots: Iterable[Slot]) -> Group:
        """Return all slots of some nodes as rows; good until one of them is dropped."""
        rows = np.array([slot.row for slot in slots], np.intp)
        node_of = self.slots.node[rows].astype(np.intp)
        touched, index = np.unique(node_of, return_inverse=True)
        return Group(rows, node_of, touched, index)

    def recount_all(self, group: Group) -> None:
        """As `count`, for all slots of some nodes whose figures came anew, queues included.

        Whether they are eligible must be known: `freshen` first where totals changed.
        """
        slots, nodes = self.slots, self.nodes
        rows, node_of, touched = group.rows, group.node_of, group.touched
        total, before = slots.total[rows], slots.taken[rows]
        taken = np.maximum(slots.used[rows] + slots.pending[rows], slots.own[rows])
        slots.taken[rows] = taken
        on_node = np.bincount(group.index, taken)
        places = np.bincount(group.index, total)
        nodes.taken[touched], nodes.places[touched] = on_node, places
        nodes.crowd[touched] = crowd_costs(on_node, places)
        slots.cost[rows] = place_costs(taken, total, nodes.queued[node_of])
        if self._sharing:
            shared = rows[slots.shared[rows] & (taken != before)]
            for node in {self._slot(row).node for row in shared.tolist()}:
                self.settle(node)
        eligible = slots.eligible[rows]
        stale = (eligible & (taken < total)) != (slots.position[rows] >= 0)
        self._refresh(rows[stale].tolist())

    def cool(self, slot: Slot, cooling: bool) -> None:
        """Let a slot alone for a while, or no longer."""
        self.slots.cooling_v[slot.row] = cooling
        self._refresh((slot.row,))

    # Inside.

    def _profile(self, node: Node) -> None:
        profile = profile_of(node.registration)
        node.profile = self._profiles.setdefault(profile, len(self._profiles))

    def _refresh(self, rows: Iterable[int]) -> None:
        self.changes += 1
        for row in rows:
            offers = self.by_number[self.slots.pool_v[row]]
            if offers.refresh(row):
                self._opened(offers.pool)

    def _slot(self, row: int) -> Slot:
        slot = self.handles[row]
        if slot is None:
            raise LookupError(f"slot row {row}: free; expected one that a slot has")
        return slot

    def _refit(self, offers: Offers) -> None:
        """Look once at each kind of node, not at each node."""
        fits: dict[int, bool] = {}
        for slots in offers.nodes.values():
            node = slots[0].node
            fit = fits.get(node.profile)
            if fit is None:
                fit = fits[node.profile] = not misfit(offers.spec, node.registration)
            for slot in slots:
                self.slots.fits_v[slot.row] = fit


def _shares(spec: PoolSpec | None) -> bool:
    return spec is not None and (spec.exclusive or bool(spec.accelerator))
