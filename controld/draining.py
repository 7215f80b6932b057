"""Drains in motion: the store's records in, which nodes are drained out to all shards."""

from __future__ import annotations

import asyncio

import structlog

from controld.core.drains import DrainPlan, NodeDrain, plan_drains
from controld.registry import Registry
from controld.shards import Shards

_log = structlog.get_logger(__name__)


class Draining:
    """Decides anew whenever a drain, a node or a verdict changes, and tells the shards."""

    def __init__(self, registry: Registry, shards: Shards, max_share: float) -> None:
        self._registry = registry
        self._shards = shards
        self._max_share = max_share
        self._due: asyncio.Handle | None = None
        self.plan = DrainPlan({}, {})

    async def start(self) -> None:
        """Begin to follow the records."""
        self._registry.drains.listen(self._changed)
        self._registry.nodes.listen(self._changed)
        self._registry.lost.listen(self._changed)
        self._decide()

    async def close(self) -> None:
        """Follow no more. Idempotent."""
        self._registry.drains.unlisten(self._changed)
        self._registry.nodes.unlisten(self._changed)
        self._registry.lost.unlisten(self._changed)
        if self._due is not None:
            self._due.cancel()

    def of(self, node: str) -> NodeDrain | None:
        """Return the drain that stands or waits for its turn, None for a node of neither."""
        return self.plan.standing.get(node) or self.plan.waiting.get(node)

    def _changed(self, name: str, record: object, revision: int) -> None:
        # A watch brings many changes at once: one decision is enough for them.
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        self._due = None
        registry, before = self._registry, self.plan
        self.plan = plan_drains(
            registry.drains.records,
            registry.nodes.records,
            registry.lost.records,
            self._max_share,
        )
        for name in self.plan.waiting.keys() - before.waiting.keys():
            _log.warning("node asks to be drained and waits for its turn", node=name)
        for name in self.plan.standing.keys() - before.standing.keys():
            drain = self.plan.standing[name]
            _log.info("node is drained", node=name, reason=drain.reason, planned=drain.planned)
        self._shards.set_drains(self.plan.standing)
