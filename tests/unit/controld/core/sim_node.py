"""A simulated agentd: what it holds, refuses and obeys."""

from __future__ import annotations

from dataclasses import dataclass, field

from corefleet.messages.records import DomainInfo, NodeRegistration, PoolSpec
from corefleet.messages.wire import (
    AssignAnswer,
    Assignment,
    NodeState,
    NodeView,
    RackDigest,
    SlotUse,
)

POOLS = {
    "chat": PoolSpec(name="chat", weight=2, max_in_flight=4),
    "crunch": PoolSpec(name="crunch", pool_class="batch", max_in_flight_per_tenant=1),
}
SLOTS = 2


@dataclass
class SimNode:
    """An agentd: what it holds, and whom it obeys."""

    name: str
    epoch: int = 1
    alive: bool = True
    held: dict[str, Assignment] = field(default_factory=dict)
    denied: dict[str, int] = field(default_factory=dict)
    owner_epoch: int = 0

    def registration(self) -> NodeRegistration:
        slots = dict.fromkeys(POOLS, SLOTS)
        domain = DomainInfo(domain=0, cpus="0-3", slots=slots)
        return NodeRegistration(node=self.name, epoch=self.epoch, domains=(domain,))

    def offer(self, item: Assignment) -> AssignAnswer:
        record = item.record
        if record.owner_epoch < self.owner_epoch:
            return AssignAnswer(record.task, record.attempt, False, "an older owner")
        self.owner_epoch = record.owner_epoch
        if record.attempt <= self.denied.get(record.task, 0):
            return AssignAnswer(record.task, record.attempt, False, "denied before")
        found = self.held.get(record.task)
        if found is not None and found.record.attempt >= record.attempt:
            return AssignAnswer(record.task, record.attempt, True)
        used = sum(held.record.pool == record.pool for held in self.held.values())
        if found is None and used >= SLOTS:
            self.denied[record.task] = record.attempt
            return AssignAnswer(record.task, record.attempt, False, "full")
        self.held[record.task] = item
        return AssignAnswer(record.task, record.attempt, True)

    def let_go(self, task: str, attempt: int) -> None:
        self.denied[task] = max(attempt, self.denied.get(task, 0))
        found = self.held.get(task)
        if found is not None and found.record.attempt <= attempt:
            del self.held[task]


def digest_of(nodes: list[SimNode], number: int) -> RackDigest:
    """What the owner of their rack tells of the nodes."""
    views = []
    for node in nodes:
        used = {
            pool: sum(held.record.pool == pool for held in node.held.values()) for pool in POOLS
        }
        slots = tuple(SlotUse(pool, 0, SLOTS, used[pool]) for pool in POOLS)
        state: NodeState = "ready" if node.alive else "lost"
        views.append(NodeView(node=node.name, epoch=node.epoch, state=state, slots=slots))
    return RackDigest(rack="rack0", controld="c0", epoch=1, number=number, nodes=tuple(views))
