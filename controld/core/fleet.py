"""What one controld knows of all nodes, and what changed when it learns more."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from controld.core.eligibility import Node, Offers, Slot, misfit
from controld.core.turns import Turns
from corefleet.messages.records import Drain, LostNode, NodeRegistration, PoolSpec
from corefleet.messages.wire import LoadVector, NodeView, RackDigest, SlotUse, Verdict

_SMOOTHING = 0.5
"""Share of a new load in the smoothed one."""

_TAKE_LAG_S = 0.05
"""A placement younger than this at a beat's receipt may be missing from the beat."""

_MOST_CHANGES = 4096
"""Own changes remembered for a node whose digests stay away."""

_COOL_FIRST_S = 0.1
_COOL_MOST_S = 2.0
_FOREVER = 2**62


@dataclass(slots=True, frozen=True)
class Gone:
    """Attempts of `node` at `node_epoch` and at older epochs are gone."""

    node: str
    node_epoch: int
    reason: str


@dataclass(slots=True, frozen=True)
class Stuck:
    """A task of `node` made no progress for `age_s`; the shard knows whether that is long."""

    node: str
    task: str
    attempt: int
    age_s: float


@dataclass(slots=True)
class FleetDelta:
    """What one piece of news changed. `capacity`: a place opened that was not there."""

    gone: list[Gone] = field(default_factory=list)
    stuck: list[Stuck] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    """Nodes whose agentd started anew within its epoch."""
    capacity: bool = False


@dataclass(slots=True, frozen=True)
class NodeStatus:
    """A node for people: as registered, and as last heard of."""

    registration: NodeRegistration
    state: str
    load: LoadVector
    running: int
    queued: int
    slots: tuple[SlotUse, ...]
    beat_age_s: float


class Fleet:
    """All nodes, shared by all shards of one controld. `sample_size` is placement's."""

    def __init__(self, sample_size: int = 8) -> None:
        self.sample_size = sample_size
        self._nodes: dict[str, Node] = {}
        self._offers: dict[str, Offers] = {}
        self._pools: dict[str, PoolSpec] = {}
        self._racks: dict[str, tuple[int, int]] = {}
        self._lost: dict[str, int] = {}
        """Newest epoch found lost, also of nodes that are not registered yet."""
        self._drains: Mapping[str, Drain] = {}
        self._cooling: list[tuple[float, int, Slot]] = []
        self._count = 0
        self._turns = Turns(self._offers)

    # What placement and the shards ask.

    def offers(self, pool: str) -> Offers | None:
        """Return the pool's slots, None when no node ever offered it."""
        return self._offers.get(pool)

    def is_gone(self, node: str, epoch: int) -> bool:
        """Return whether attempts of `node` at `epoch` are known to be gone."""
        found = self._nodes.get(node)
        if found is None:
            return epoch <= self._lost.get(node, 0)
        return epoch <= found.gone_epoch or (found.state == "cut" and epoch <= found.epoch)

    def knows(self, node: str) -> bool:
        """Return whether the node is registered."""
        return node in self._nodes

    def is_draining(self, node: str) -> bool:
        """Return whether the node is given nothing new; so it is with one that nobody knows."""
        found = self._nodes.get(node)
        return found is None or bool(found.draining)

    def slot(self, node: str, epoch: int, pool: str, domain: int) -> Slot | None:
        """Return where a stored attempt runs, None when that is no more."""
        found = self._nodes.get(node)
        if found is None or found.epoch != epoch:
            return None
        return found.slots.get((pool, domain))

    def nodes(self) -> list[NodeStatus]:
        """Return all nodes, for people."""
        return [_status(node) for node in self._nodes.values()]

    def status(self, node: str) -> NodeStatus | None:
        """Return one node, for people; None when nobody knows it."""
        found = self._nodes.get(node)
        return _status(found) if found is not None else None

    # What the shards did.

    def took(self, slot: Slot, now: float) -> None:
        """Count a new placement of ours."""
        slot.own += 1
        slot.pending += 1
        takes = slot.node.takes
        takes.append((now, slot))
        if len(takes) > _MOST_CHANGES:
            takes.popleft()[1].pending -= 1
        self._recount(slot)

    def adopted(self, slot: Slot) -> None:
        """Count an attempt that was placed before our time: the beats show it already."""
        slot.own += 1
        self._recount(slot)

    def gave_back(self, slot: Slot, now: float) -> None:
        """An attempt of ours is over."""
        slot.own -= 1
        slot.pending -= 1
        gives = slot.node.gives
        gives.append((now, slot))
        if len(gives) > _MOST_CHANGES:
            gives.popleft()[1].pending += 1
        self._recount(slot)

    def disowned(self, slot: Slot) -> None:
        """An attempt goes on under another owner: the beats go on showing it."""
        slot.own -= 1
        self._recount(slot)

    def refused(self, slot: Slot, now: float) -> None:
        """The node refused: leave its slot alone for a moment, longer each time in a row."""
        pause = min(_COOL_FIRST_S * 2.0 ** min(slot.refusals, 8), _COOL_MOST_S)
        slot.refusals += 1
        slot.cooling_until = now + pause
        self._count += 1
        heapq.heappush(self._cooling, (slot.cooling_until, self._count, slot))
        self._offers[slot.pool].refresh(slot)

    def accepted(self, slot: Slot) -> None:
        slot.refusals = 0

    def turn(self, pool: str, shard: int) -> bool:
        """Return whether `shard` may take a place of `pool`; if not, it stands in line."""
        return self._turns.turn(pool, shard)

    def wait(self, pool: str, shard: int) -> None:
        """Let `shard` stand in line for a place of `pool`."""
        self._turns.wait(pool, shard)

    def woken(self) -> list[int]:
        """Return shards whose turn it is: each must be told FleetChanged. Ask until empty."""
        return self._turns.woken()

    def forget_shard(self, shard: int) -> None:
        """The shard is no longer ours: it stands in no line."""
        self._turns.forget_shard(shard)

    # What is heard.

    def set_pools(self, pools: dict[str, PoolSpec]) -> FleetDelta:
        """Take all pools of the cluster."""
        delta = FleetDelta()
        for name in self._offers.keys() | pools.keys():
            spec = pools.get(name)
            if spec != self._pools.get(name):
                offers = self._offers.get(name) or self._add_offers(name)
                before = len(offers.open)
                offers.set_spec(spec)
                self._opened(offers, len(offers.open) > before, delta)
        self._pools = dict(pools)
        return delta

    def set_drains(self, drains: Mapping[str, Drain]) -> FleetDelta:
        """Take all planned drains of the cluster, by node."""
        delta = FleetDelta()
        before, self._drains = self._drains, dict(drains)
        for name in before.keys() | drains.keys():
            node = self._nodes.get(name)
            if node is not None and node.drain != drains.get(name):
                node.drain = drains.get(name)
                for slot in node.slots.values():
                    offers = self._offers[slot.pool]
                    self._opened(offers, offers.refresh(slot), delta)
        return delta

    def registered(self, registration: NodeRegistration, now: float) -> FleetDelta:
        """A registration as stored: a new epoch ends the attempts of older ones."""
        delta = FleetDelta()
        node = self._nodes.get(registration.node)
        if node is not None and registration.epoch < node.epoch:
            return delta
        if node is None or registration.epoch > node.epoch:
            if node is not None:
                self._drop_slots(node)
            fresh = Node(registration)
            fresh.drain = self._drains.get(fresh.name)
            self._nodes[fresh.name] = fresh
            for domain in registration.domains:
                for pool, total in domain.slots.items():
                    self._add_slot(fresh, pool, domain.domain, total)
            if fresh.gone_epoch > 0:
                reason = f"node started anew (epoch {fresh.epoch})"
                delta.gone.append(Gone(fresh.name, fresh.gone_epoch, reason))
            self._mark_lost(fresh, self._lost.get(fresh.name, 0), "found lost", delta)
            return delta
        if registration.started_ms != node.registration.started_ms:
            delta.resumed.append(node.name)
        node.registration = registration
        for slot in node.slots.values():
            offers = self._offers[slot.pool]
            slot.misfit = misfit(offers.spec, registration)
            self._opened(offers, offers.refresh(slot), delta)
        return delta

    def removed(self, node: str, now: float) -> FleetDelta:
        """The registration was deleted: whatever ran there is gone."""
        delta = FleetDelta()
        found = self._nodes.pop(node, None)
        if found is not None:
            self._drop_slots(found)
            delta.gone.append(Gone(node, _FOREVER, "node was removed"))
        return delta

    def lost(self, lost: LostNode, now: float) -> FleetDelta:
        """A verdict that stands in the store."""
        delta = FleetDelta()
        self._find_lost(lost.node, lost.epoch, lost.reason, delta)
        return delta

    def verdict(self, verdict: Verdict, now: float) -> FleetDelta:
        """A verdict that a rack owner pushed."""
        delta = FleetDelta()
        if verdict.rack_epoch < self._racks.get(verdict.rack, (0, 0))[0]:
            return delta
        if verdict.state == "lost":
            self._find_lost(verdict.node, verdict.node_epoch, verdict.reason, delta)
            return delta
        node = self._nodes.get(verdict.node)
        if node is not None and node.epoch == verdict.node_epoch:
            self._set_state(node, "cut", verdict.reason, delta)
        return delta

    def held(self, node: str, epoch: int) -> FleetDelta:
        """A loss that is held: the node gets nothing new, and keeps what it has."""
        delta = FleetDelta()
        found = self._nodes.get(node)
        if found is not None and found.epoch == epoch:
            self._set_state(found, "held", "", delta)
        return delta

    def revived(self, node: str, epoch: int) -> None:
        """A loss that never stood in the store was withdrawn: the next digest says how it is."""
        found = self._nodes.get(node)
        if found is not None and found.epoch == epoch and found.gone_epoch == epoch:
            found.gone_epoch = self._lost[node] = epoch - 1

    def digest(self, digest: RackDigest, now: float) -> FleetDelta:
        """A rack owner's view of its nodes; older owners' and overtaken ones are ignored."""
        delta = FleetDelta()
        stamp = (digest.epoch, digest.number)
        if stamp <= self._racks.get(digest.rack, (0, 0)):
            return delta
        self._racks[digest.rack] = stamp
        for view in digest.nodes:
            node = self._nodes.get(view.node)
            if node is not None and view.epoch == node.epoch:
                self._take_view(node, view, now, delta)
        return delta

    def tick(self, now: float) -> FleetDelta:
        """End the cool-downs that are over."""
        delta = FleetDelta()
        while self._cooling and self._cooling[0][0] <= now:
            _, _, slot = heapq.heappop(self._cooling)
            if slot.cooling_until <= now:
                slot.cooling_until = 0.0
                offers = self._offers[slot.pool]
                self._opened(offers, offers.refresh(slot), delta)
        return delta

    # Inside.

    def _take_view(self, node: Node, view: NodeView, now: float, delta: FleetDelta) -> None:
        node.beat_age_s = view.beat_age_s
        if view.state == "lost":
            self._find_lost(node.name, view.epoch, "its rack's owner found it lost", delta)
            return
        if node.epoch <= node.gone_epoch:
            return
        if view.state != node.state:
            self._set_state(node, view.state, "cut off from NATS", delta)
        node.running = view.running
        node.queued = view.queued
        if view.load != node.load:
            node.load = _smoothed(node.load, view.load)
            load = node.load
            node.worst = max(
                load.cpu, load.memory_bandwidth, load.memory, load.network, load.storage
            )
            node.costs.clear()
        self._take_slots(node, view, now, delta)
        for slow in view.slow:
            delta.stuck.append(Stuck(node.name, slow.task, slow.attempt, slow.progress_age_s))

    def _take_slots(self, node: Node, view: NodeView, now: float, delta: FleetDelta) -> None:
        """Set the beat's figures, and take back corrections that it already contains."""
        beat_at = now - view.beat_age_s
        takes, gives = node.takes, node.gives
        settled = bool(takes or gives)
        while takes and takes[0][0] <= beat_at - _TAKE_LAG_S:
            takes.popleft()[1].pending -= 1
        while gives and gives[0][0] <= beat_at:
            gives.popleft()[1].pending += 1
        if view.slots and view.slots != node.seen_slots:
            node.seen_slots = view.slots
            named = set()
            for use in view.slots:
                key = (use.pool, use.domain)
                named.add(key)
                slot = node.slots.get(key) or self._add_slot(node, use.pool, use.domain, 0)
                slot.total = use.total
                slot.used = use.used
            for key, slot in node.slots.items():
                if key not in named:
                    slot.total = slot.used = 0
        elif not settled:
            return
        for slot in node.slots.values():
            offers = self._offers[slot.pool]
            if offers.refresh(slot):
                self._opened(offers, True, delta)

    def _find_lost(self, name: str, epoch: int, reason: str, delta: FleetDelta) -> None:
        if epoch > self._lost.get(name, 0):
            self._lost[name] = epoch
        node = self._nodes.get(name)
        if node is not None:
            self._mark_lost(node, epoch, reason, delta)

    def _mark_lost(self, node: Node, epoch: int, reason: str, delta: FleetDelta) -> None:
        if epoch <= node.gone_epoch:
            return
        node.gone_epoch = epoch
        delta.gone.append(Gone(node.name, epoch, reason or "found lost"))
        if epoch >= node.epoch:
            self._set_state(node, "lost", reason, delta)

    def _set_state(self, node: Node, state: str, reason: str, delta: FleetDelta) -> None:
        if state == node.state or (node.state == "lost" and node.epoch <= node.gone_epoch):
            return
        node.state = state
        if state == "cut":
            delta.gone.append(Gone(node.name, node.epoch, reason or "cut off from NATS"))
        for slot in node.slots.values():
            offers = self._offers[slot.pool]
            self._opened(offers, offers.refresh(slot), delta)

    def _add_offers(self, pool: str) -> Offers:
        offers = self._offers[pool] = Offers(pool)
        offers.spec = self._pools.get(pool)
        return offers

    def _add_slot(self, node: Node, pool: str, domain: int, total: int) -> Slot:
        offers = self._offers.get(pool) or self._add_offers(pool)
        slot = Slot(node, pool, domain, total)
        node.slots[(pool, domain)] = slot
        offers.add(slot)
        return slot

    def _drop_slots(self, node: Node) -> None:
        for slot in node.slots.values():
            self._offers[slot.pool].remove(slot)

    def _recount(self, slot: Slot) -> None:
        if self._offers[slot.pool].recount(slot):
            self._turns.opened(slot.pool)

    def _opened(self, offers: Offers, opened: bool, delta: FleetDelta) -> None:
        if opened:
            delta.capacity = True
            self._turns.opened(offers.pool)


def _status(node: Node) -> NodeStatus:
    return NodeStatus(
        registration=node.registration,
        state="draining" if node.draining and node.state == "ready" else node.state,
        load=node.load,
        running=node.running,
        queued=node.queued,
        slots=tuple(
            SlotUse(pool=slot.pool, domain=slot.domain, total=slot.total, used=slot.taken)
            for slot in node.slots.values()
        ),
        beat_age_s=node.beat_age_s,
    )


def _smoothed(old: LoadVector, new: LoadVector) -> LoadVector:
    keep = 1.0 - _SMOOTHING
    return LoadVector(
        cpu=keep * old.cpu + _SMOOTHING * new.cpu,
        memory_bandwidth=keep * old.memory_bandwidth + _SMOOTHING * new.memory_bandwidth,
        memory=keep * old.memory + _SMOOTHING * new.memory,
        network=keep * old.network + _SMOOTHING * new.network,
        storage=keep * old.storage + _SMOOTHING * new.storage,
    )
