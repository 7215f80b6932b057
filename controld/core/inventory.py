"""Which attempts are on which node, and when to ask the node whether it has them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from controld.core.rng import Rng
from controld.core.task import Task

_PATIENCE = 3
"""Unanswered queries after which an unregistered node counts as gone."""


class NodeAttempts:
    """The attempts on one node."""

    __slots__ = ("asked_at", "node", "tasks", "unanswered")

    def __init__(self, node: str) -> None:
        self.node = node
        self.tasks: dict[str, Task] = {}
        self.unanswered = 0
        self.asked_at = 0.0


class Inventory:
    """All attempts of a shard by node. Every node with attempts is asked every so often."""

    def __init__(self, interval_s: float, first_s: float, rng: Rng) -> None:
        self._interval_s = interval_s
        self._first_s = first_s
        self._rng = rng
        self._nodes: dict[str, NodeAttempts] = {}
        self._due: list[tuple[float, str]] = []

    def add(self, task: Task, node: str, now: float) -> None:
        attempts = self._nodes.get(node)
        if attempts is None:
            attempts = self._nodes[node] = NodeAttempts(node)
            self._schedule(node, now, self._interval_s)
        attempts.tasks[task.id] = task

    def remove(self, task: Task, node: str) -> None:
        attempts = self._nodes.get(node)
        if attempts is not None:
            attempts.tasks.pop(task.id, None)

    def on(self, node: str) -> list[Task]:
        """Return the tasks with an attempt on `node` or being placed there."""
        attempts = self._nodes.get(node)
        return list(attempts.tasks.values()) if attempts else []

    def nodes(self) -> list[str]:
        return [name for name, attempts in self._nodes.items() if attempts.tasks]

    def answered(self, node: str) -> None:
        attempts = self._nodes.get(node)
        if attempts is not None:
            attempts.unanswered = 0

    def ask_all(self, now: float) -> None:
        """Ask all nodes at the next `due`: after a take-over nothing is known of them."""
        self._due = [(now, node) for node in self._nodes]
        heapq.heapify(self._due)

    def ask(self, node: str, now: float) -> None:
        """Ask one node at the next `due`: its agentd started anew."""
        attempts = self._nodes.get(node)
        if attempts is not None:
            attempts.asked_at = 0.0
            self._due = [entry for entry in self._due if entry[1] != node]
            self._due.append((now, node))
            heapq.heapify(self._due)

    def due(self, now: float) -> Iterator[NodeAttempts]:
        """Yield the nodes to be asked now, and plan their next time."""
        while self._due and self._due[0][0] <= now:
            _, node = heapq.heappop(self._due)
            attempts = self._nodes[node]
            if not attempts.tasks:
                del self._nodes[node]
                continue
            rest = attempts.asked_at + self._interval_s - now
            if attempts.asked_at and not attempts.unanswered and rest > self._first_s:
                self._schedule(node, now, rest)
                continue
            attempts.unanswered += 1
            attempts.asked_at = now
            soon = attempts.unanswered <= _PATIENCE
            self._schedule(node, now, self._first_s if soon else self._interval_s)
            yield attempts

    def silent(self, attempts: NodeAttempts) -> bool:
        """Return whether the node left so many queries unanswered that it may be no more."""
        return attempts.unanswered > _PATIENCE

    def _schedule(self, node: str, now: float, interval_s: float) -> None:
        spread = 0.8 + 0.4 * self._rng.random()
        heapq.heappush(self._due, (now + interval_s * spread, node))
