"""What one controld knows of all nodes, and what changed when it learns more."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from controld.core.eligibility import Node, Offers, Slot
from controld.core.places import Places
from controld.core.preemption import Preemption
from controld.core.rack_news import RackNews
from controld.core.rng import Rng
from controld.core.turns import Turns
from corefleet.messages.records import Drain, LostNode, NodeRegistration, PoolSpec
from corefleet.messages.wire import LoadVector, NodeView, RackDigest, SlotUse, Verdict

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
        self._places = Places(self._slot_opened)
        self._news = RackNews(self._places, self._nodes.get, self._view_entered)
        self._racks: dict[str, tuple[int, int]] = {}
        self._lost: dict[str, int] = {}
        """Newest epoch found lost, also of nodes that are not registered yet."""
        self._drains: Mapping[str, Drain] = {}
        self._cooling: list[tuple[float, int, Slot]] = []
        self._count = 0
        self._turns = Turns(self._places.offers)
        self._preemption = Preemption(self._places)
        self._delta = FleetDelta()
        """What the news that is being taken in changed so far."""

    # What placement and the shards ask.

    def offers(self, pool: str) -> Offers | None:
        """Return the pool's slots, None when no node ever offered it."""
        return self._places.offers.get(pool)

    def is_gone(self, node: str, epoch: int) -> bool:
        """Return whether attempts of `node` at `epoch` are known to be gone."""
        found = self._nodes.get(node)
        if found is None:
            return epoch <= self._lost.get(node, 0)
        return epoch <= found.gone_epoch or (found.state == "cut" and epoch <= found.epoch)

    def knows(self, node: str) -> bool:
        """Return whether the node is registered."""
        return node in self._nodes

    def newest(self, rack: str) -> tuple[int, int]:
        """Return owner's epoch and number of the rack's newest digest: older ones are overtaken."""
        return self._racks.get(rack, (0, 0))

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

    def preemptable(self, pool: str, rng: Rng) -> Slot | None:
        """Return a slot that a yield of our batch may open for an online pool: see Preemption."""
        return self._preemption.slot(pool, rng)

    def nodes(self) -> list[NodeStatus]:
        """Return all nodes, for people."""
        return [_status(node) for node in self._nodes.values()]

    def status(self, node: str) -> NodeStatus | None:
        """Return one node, for people; None when nobody knows it."""
        found = self._nodes.get(node)
        return _status(found) if found is not None else None

    def all_nodes(self) -> list[Node]:
        """Return all nodes as they are kept, to be read only: cheaper than `nodes`."""
        return list(self._nodes.values())

    # What the shards did. Of slots that are no more nothing is counted.

    def took(self, slot: Slot, now: float) -> None:
        """Count a new placement of ours."""
        if slot.row < 0:
            return
        takes = slot.node.takes
        takes.append((now, slot))
        if len(takes) > _MOST_CHANGES:
            self._add_pending(takes.popleft()[1], -1)
        self._places.count(slot.row, 1, 1)

    def adopted(self, slot: Slot) -> None:
        """Count an attempt that was placed before our time: the beats show it already."""
        if slot.row >= 0:
            self._places.count(slot.row, 1, 0)

    def gave_back(self, slot: Slot, now: float) -> None:
        """An attempt of ours is over."""
        if slot.row < 0:
            return
        gives = slot.node.gives
        gives.append((now, slot))
        if len(gives) > _MOST_CHANGES:
            self._add_pending(gives.popleft()[1], 1)
        self._places.count(slot.row, -1, -1)

    def disowned(self, slot: Slot) -> None:
        """An attempt goes on under another owner: the beats go on showing it."""
        if slot.row >= 0:
            self._places.count(slot.row, -1, 0)

    def refused(self, slot: Slot, now: float) -> None:
        """The node refused: leave its slot alone for a moment, longer each time in a row."""
        pause = min(_COOL_FIRST_S * 2.0 ** min(slot.refusals, 8), _COOL_MOST_S)
        slot.refusals += 1
        slot.cooling_until = now + pause
        self._count += 1
        heapq.heappush(self._cooling, (slot.cooling_until, self._count, slot))
        if slot.row >= 0:
            self._places.cool(slot, True)

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
        with self._hearing() as delta:
            self._places.set_pools(pools)
        return delta

    def set_drains(self, drains: Mapping[str, Drain]) -> FleetDelta:
        """Take all planned drains of the cluster, also of nodes that are not registered."""
        with self._hearing() as delta:
            old, self._drains = self._drains, dict(drains)
            for name in old.keys() | drains.keys():
                drain = drains.get(name)
                if drain == old.get(name):
                    continue
                node = self._nodes.get(name)
                if node is not None:
                    node.drain = drain
                    self._places.set_ready(node)
        return delta

    def registered(self, registration: NodeRegistration, now: float) -> FleetDelta:
        """A registration as stored: a new epoch ends the attempts of older ones."""
        with self._hearing() as delta:
            node = self._nodes.get(registration.node)
            if node is not None and registration.epoch < node.epoch:
                return delta
            if node is None or registration.epoch > node.epoch:
                if node is not None:
                    self._places.drop_node(node)
                self._enter(registration)
                return delta
            if registration.started_ms != node.registration.started_ms:
                delta.resumed.append(node.name)
            node.registration = registration
            self._places.reregistered(node)
        return delta

    def removed(self, node: str, now: float) -> FleetDelta:
        """The registration was deleted: whatever ran there is gone."""
        with self._hearing() as delta:
            found = self._nodes.pop(node, None)
            if found is not None:
                self._news.forget()
                self._places.drop_node(found)
                delta.gone.append(Gone(node, _FOREVER, "node was removed"))
        return delta

    def lost(self, lost: LostNode, now: float) -> FleetDelta:
        """A verdict that stands in the store."""
        with self._hearing() as delta:
            self._find_lost(lost.node, lost.epoch, lost.reason)
        return delta

    def verdict(self, verdict: Verdict, now: float) -> FleetDelta:
        """A verdict that a rack owner pushed."""
        with self._hearing() as delta:
            if verdict.rack_epoch < self.newest(verdict.rack)[0]:
                return delta
            if verdict.state == "lost":
                self._find_lost(verdict.node, verdict.node_epoch, verdict.reason)
                return delta
            node = self._nodes.get(verdict.node)
            if node is not None and node.epoch == verdict.node_epoch:
                self._set_state(node, "cut", verdict.reason)
        return delta

    def held(self, node: str, epoch: int) -> FleetDelta:
        """A loss that is held: the node gets nothing new, and keeps what it has."""
        with self._hearing() as delta:
            found = self._nodes.get(node)
            if found is not None and found.epoch == epoch:
                self._set_state(found, "held", "")
            return delta

    def revived(self, node: str, epoch: int) -> None:
        """A loss that never stood in the store was withdrawn: the next digest says how it is."""
        found = self._nodes.get(node)
        if found is not None and found.epoch == epoch and found.gone_epoch == epoch:
            found.gone_epoch = self._lost[node] = epoch - 1
            self._news.forget()

    def digest(self, digest: RackDigest, now: float) -> FleetDelta:
        """A rack owner's view of its nodes; older owners' and overtaken ones are ignored."""
        with self._hearing() as delta:
            stamp = (digest.epoch, digest.number)
            if stamp <= self.newest(digest.rack):
                return delta
            self._racks[digest.rack] = stamp
            self._news.take(digest, now)
            for view in digest.nodes:
                if view.slow:
                    self._pass_on_slow(view)
        return delta

    def tick(self, now: float) -> FleetDelta:
        """End the cool-downs that are over."""
        with self._hearing() as delta:
            while self._cooling and self._cooling[0][0] <= now:
                _, _, slot = heapq.heappop(self._cooling)
                if slot.cooling_until <= now:
                    slot.cooling_until = 0.0
                    if slot.row >= 0:
                        self._places.cool(slot, False)
        return delta

    # Inside.

    @contextmanager
    def _hearing(self) -> Iterator[FleetDelta]:
        """What happens within belongs to the delta; what the shards do later does not."""
        self._delta = FleetDelta()
        try:
            yield self._delta
        finally:
            self._delta = FleetDelta()

    def _slot_opened(self, pool: str) -> None:
        self._delta.capacity = True
        self._turns.opened(pool)

    def _enter(self, registration: NodeRegistration) -> None:
        """Take in a node at a new epoch."""
        self._news.forget()
        node = self._nodes[registration.node] = self._places.add_node(registration)
        node.drain = self._drains.get(node.name)
        for domain in registration.domains:
            for pool, total in domain.slots.items():
                self._places.add_slot(node, pool, domain.domain, total)
        self._places.freshen(node)
        if node.gone_epoch > 0:
            reason = f"node started anew (epoch {node.epoch})"
            self._delta.gone.append(Gone(node.name, node.gone_epoch, reason))
        self._mark_lost(node, self._lost.get(node.name, 0), "found lost")

    def _add_pending(self, slot: Slot, change: int) -> None:
        """A change too old to remember: the beats must show it by now."""
        self._places.count(slot.row, 0, change)

    def _view_entered(self, node: Node, view: NodeView) -> None:
        """A digest shows a node, perhaps in another state."""
        if view.state == "lost":
            self._find_lost(node.name, view.epoch, "its rack's owner found it lost")
        elif node.epoch > node.gone_epoch:
            self._set_state(node, view.state, "cut off from NATS")

    def _pass_on_slow(self, view: NodeView) -> None:
        node = self._nodes.get(view.node)
        if node is not None and node.gone_epoch < node.epoch == view.epoch:
            for slow in view.slow:
                stuck = Stuck(node.name, slow.task, slow.attempt, slow.progress_age_s)
                self._delta.stuck.append(stuck)

    def _find_lost(self, name: str, epoch: int, reason: str) -> None:
        if epoch > self._lost.get(name, 0):
            self._lost[name] = epoch
        node = self._nodes.get(name)
        if node is not None:
            self._mark_lost(node, epoch, reason)

    def _mark_lost(self, node: Node, epoch: int, reason: str) -> None:
        if epoch <= node.gone_epoch:
            return
        node.gone_epoch = epoch
        self._news.forget()
        self._delta.gone.append(Gone(node.name, epoch, reason or "found lost"))
        if epoch >= node.epoch:
            self._set_state(node, "lost", reason)

    def _set_state(self, node: Node, state: str, reason: str) -> None:
        if state == node.state or (node.state == "lost" and node.epoch <= node.gone_epoch):
            return
        node.state = state
        self._news.forget()
        if state == "cut":
            reason = reason or "cut off from NATS"
            self._delta.gone.append(Gone(node.name, node.epoch, reason))
        self._places.set_ready(node)


def _status(node: Node) -> NodeStatus:
    return NodeStatus(
        registration=node.registration,
        state=node.shown_state,
        load=node.load,
        running=node.running,
        queued=node.queued,
        slots=tuple(
            SlotUse(pool=slot.pool, domain=slot.domain, total=slot.total, used=slot.taken)
            for slot in node.slots.values()
        ),
        beat_age_s=node.beat_age_s,
    )
