"""A simulated node: what it holds, and what it answers. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from corefleet.messages.records import DomainInfo, NodeRegistration
from corefleet.messages.wire import (
    AssignAnswer,
    Assignment,
    Heartbeat,
    InventoryAnswer,
    InventoryQuery,
    LoadVector,
    SlotUse,
)

CORES_A_DOMAIN = 64
MEMORY_A_DOMAIN = 256 << 30

Life = Literal["new", "alive", "dead"]


@dataclass(slots=True)
class SimNode:
    """One node with its domains; `slots` is what each domain offers, by pool."""

    name: str
    rack: str
    slots: dict[str, int]
    domains: int = 2
    life: Life = "new"
    epoch: int = 0
    draining: bool = False
    refuses: bool = False
    """Says no to every assignment, as a node does whose workers do not start."""
    held: dict[str, Assignment] = field(default_factory=dict)
    """By task; at most one attempt of each."""
    number: int = 0

    def registration(self, probe_address: str, started_ms: int) -> NodeRegistration:
        """Return what the node registers with."""
        return NodeRegistration(
            node=self.name,
            rack=self.rack,
            probe_address=probe_address,
            arch="aarch64",
            domains=tuple(
                DomainInfo(
                    domain=domain,
                    cpus=f"{domain * CORES_A_DOMAIN}-{(domain + 1) * CORES_A_DOMAIN - 1}",
                    memory_bytes=MEMORY_A_DOMAIN,
                    slots=dict(self.slots),
                )
                for domain in range(self.domains)
            ),
            version="simulated",
            started_ms=started_ms,
            draining=self.draining,
        )

    def assigned(self, item: Assignment) -> tuple[AssignAnswer, bool]:
        """Answer an assignment; the second value says whether an attempt is to be run."""
        record = item.record
        task, attempt = record.task, record.attempt
        held = self.held.get(task)
        if held is not None and held.record.attempt == attempt:
            return AssignAnswer(task, attempt, accepted=True), False
        reason = self._refusal(item, held)
        if reason:
            return AssignAnswer(task, attempt, accepted=False, reason=reason), False
        self.held[task] = item
        return AssignAnswer(task, attempt, accepted=True), True

    def over(self, item: Assignment) -> None:
        """An attempt is over; another one of its task may have come meanwhile."""
        if self.held.get(item.record.task) is item:
            del self.held[item.record.task]

    def inventory(self, query: InventoryQuery) -> InventoryAnswer:
        """Return those of the query that are not here."""
        absent = tuple(
            each
            for each in query.held
            if (held := self.held.get(each.task)) is None or held.record.attempt != each.attempt
        )
        return InventoryAnswer(node_epoch=self.epoch, absent=absent)

    def holds(self, task: str, attempt: int) -> Assignment | None:
        """Return the attempt of `task` held here if it is `attempt` or an earlier one."""
        held = self.held.get(task)
        return held if held is not None and held.record.attempt <= attempt else None

    def beat(self, wall_ms: int) -> Heartbeat:
        """Return the next heartbeat."""
        self.number += 1
        used: dict[tuple[str, int], int] = {}
        for item in self.held.values():
            key = (item.record.pool, item.record.domain)
            used[key] = used.get(key, 0) + 1
        total = sum(self.slots.values()) * self.domains
        share = min(1.0, len(self.held) / total) if total else 0.0
        return Heartbeat(
            node=self.name,
            rack=self.rack,
            epoch=self.epoch,
            number=self.number,
            sent_ms=wall_ms,
            load=LoadVector(cpu=0.9 * share, memory_bandwidth=0.6 * share, memory=0.5 * share),
            running=len(self.held),
            slots=tuple(
                SlotUse(pool, domain, places, used.get((pool, domain), 0))
                for pool, places in self.slots.items()
                for domain in range(self.domains)
            ),
        )

    def die(self) -> list[Assignment]:
        """Be gone at once; return the attempts that end with the node."""
        self.life = "dead"
        held, self.held = list(self.held.values()), {}
        return held

    def _refusal(self, item: Assignment, held: Assignment | None) -> str:
        record = item.record
        if record.node_epoch != self.epoch:
            return f"node epoch is {self.epoch}, not {record.node_epoch}"
        if held is not None:
            return f"holds attempt {held.record.attempt} of the task"
        if self.refuses:
            return "told to refuse"
        if self.draining:
            return "draining"
        places = self.slots.get(record.pool, 0)
        used = sum(
            (each.record.pool, each.record.domain) == (record.pool, record.domain)
            for each in self.held.values()
        )
        return "" if used < places else f"all {places} places of pool {record.pool} are taken"
