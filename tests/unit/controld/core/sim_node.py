"""A simulated agentd: what it holds, refuses and obeys."""

from __future__ import annotations

from dataclasses import dataclass, field

from corefleet.messages.records import DomainInfo, NodeRegistration, PoolSpec
from corefleet.messages.wire import AssignAnswer, Assignment

POOLS = {
    "chat": PoolSpec(name="chat"),
    "crunch": PoolSpec(name="crunch", pool_class="batch"),
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
