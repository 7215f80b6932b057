"""Drains for operators: begun, ended, and told how far they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import structlog

from controld.api import render
from controld.calls import OwnerCalls
from controld.cluster import Cluster
from controld.core.drains import NodeDrain
from controld.core.fleet import Fleet, NodeStatus
from controld.draining import Draining
from controld.registry import Registry
from corefleet.codec import decode, encode
from corefleet.errors import NotFound, Unavailable
from corefleet.ids import check_name
from corefleet.messages.records import Drain, NodeRegistration
from corefleet.messages.wire import ListTasks, TaskLine, TaskList
from corefleet.rpc import fleet_pb2
from corefleet.store import Compare, Delete, Put
from corefleet.subjects import drain_key, node_key

_TRIES = 5
_INTERVAL_MS = 500
_LEAST_INTERVAL_MS = 100
_SHARDS_AT_ONCE = 32
_ANSWER_S = 1.0
_MOST_OF_A_SHARD = 1000
_FRESH_BEAT_S = 2.0
"""An older heartbeat says nothing of what runs on the node now."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Looked:
    """What all owners said of a node."""

    lines: Sequence[TaskLine]
    silent: int
    """Shards whose owner did not answer."""
    unaware: int
    """Shards whose owner may still place tasks there."""


class Drains:
    """Writes the records of drains, and asks the shards' owners what is left."""

    def __init__(
        self,
        cluster: Cluster,
        registry: Registry,
        calls: OwnerCalls,
        fleet: Fleet,
        draining: Draining,
    ) -> None:
        self._cluster = cluster
        self._registry = registry
        self._calls = calls
        self._fleet = fleet
        self._draining = draining

    async def begin(self, request: fleet_pb2.DrainNodeRequest, caller: str) -> fleet_pb2.Drain:
        """Write the drain; one that stands keeps its begin. Raises NotFound, Unavailable.

        `caller` is who asks as far as that is known, beside what the request says.
        """
        store, key = self._cluster.store, drain_key(request.node)
        await self._known(request.node)
        for _ in range(_TRIES):
            found = await store.get(key)
            now_ms = self._cluster.clock.wall_ms()
            drain = Drain(
                node=request.node,
                by=_by(request.by, caller),
                reason=request.reason,
                at_ms=decode(found.value, Drain).at_ms if found else now_ms,
                deadline_ms=now_ms + request.deadline_in_ms if request.deadline_in_ms else 0,
            )
            compare = Compare(key, found.mod_revision if found else 0)
            if (await store.commit([compare], [Put(key, encode(drain))])).succeeded:
                _log.info("drain", node=drain.node, by=drain.by, reason=drain.reason)
                return render.drain_record(drain)
        raise Unavailable(f"node {request.node}: others write its drain, too; try again")

    async def end(self, request: fleet_pb2.UndrainNodeRequest) -> fleet_pb2.UndrainNodeReply:
        """Delete the drain if one stands. Raises NotFound, Unavailable."""
        store, key = self._cluster.store, drain_key(request.node)
        node = await self._known(request.node)
        reply = fleet_pb2.UndrainNodeReply()
        if node.draining:
            asks = NodeDrain(node.node, node.draining_reason, since_ms=node.draining_since_ms)
            reply.stands.CopyFrom(render.drain(asks))
        for _ in range(_TRIES):
            found = await store.get(key)
            if found is None:
                return reply
            done = await store.commit([Compare(key, found.mod_revision)], [Delete(key)])
            if done.succeeded:
                reply.ended.CopyFrom(render.drain_record(decode(found.value, Drain)))
                _log.info("undrain", node=request.node)
                return reply
        raise Unavailable(f"node {request.node}: others write its drain, too; try again")

    async def watch(
        self, request: fleet_pb2.WatchDrainRequest
    ) -> AsyncIterator[fleet_pb2.DrainProgress]:
        """Yield how far the drain is; ends with the node drained, or the drain ended.

        Raises NotFound, Unavailable.
        """
        await self._known(request.node)
        pause_s = max(request.interval_ms or _INTERVAL_MS, _LEAST_INTERVAL_MS) / 1000
        while True:
            progress = await self._progress(request.node)
            yield progress
            if progress.drained or not progress.HasField("drain"):
                return
            await asyncio.sleep(pause_s)

    async def _progress(self, node: str) -> fleet_pb2.DrainProgress:
        # What stands is read from the store: our own picture may be a moment behind it.
        found = await self._cluster.store.get(drain_key(node))
        asks = self._draining.of(node)
        now_ms = self._cluster.clock.wall_ms()
        progress = fleet_pb2.DrainProgress(node=node, at_ms=now_ms)
        if found is not None:
            progress.drain.CopyFrom(render.drain_record(decode(found.value, Drain)))
        elif asks is not None and not asks.planned:
            waits = node in self._draining.plan.waiting
            progress.drain.CopyFrom(render.drain(asks, waits=waits))
        looked = await self._look(node)
        status = self._fleet.status(node)
        for line in sorted(looked.lines, key=lambda line: line.record.created_ms):
            progress.left.append(render.drained_attempt(line, now_ms))
        if status is not None:
            progress.state, progress.running = status.state, status.running + status.queued
        progress.waits_for = _waits_for(looked, status)
        progress.drained = not progress.waits_for and progress.HasField("drain")
        return progress

    async def _look(self, node: str) -> _Looked:
        """Ask all owners, many at once but not all."""
        room = asyncio.Semaphore(_SHARDS_AT_ONCE)
        question = ListTasks(node=node, limit=_MOST_OF_A_SHARD)

        async def ask(shard: int) -> TaskList | None:
            async with room:
                try:
                    return await self._calls.list(shard, question, _ANSWER_S)
                except Unavailable:
                    return None

        shards = range(self._cluster.settings.shards)
        answers = await asyncio.gather(*(ask(shard) for shard in shards))
        heard = [answer for answer in answers if answer is not None]
        return _Looked(
            lines=[line for answer in heard for line in answer.tasks],
            silent=len(answers) - len(heard),
            unaware=sum(not answer.draining for answer in heard),
        )

    async def _known(self, node: str) -> NodeRegistration:
        check_name("node", node)
        found = await self._cluster.store.get(node_key(node))
        if found is None:
            raise NotFound(f"node {node}: never registered; `agentctl nodes` lists those that did")
        return decode(found.value, NodeRegistration)


def _by(told: str, caller: str) -> str:
    """Return who wants a drain: what was told, with who it is by certificate or token."""
    if told and caller:
        return f"{told} as {caller}"
    return told or caller or "an operator"


def _waits_for(looked: _Looked, status: NodeStatus | None) -> str:
    """Return what keeps the node from being drained, '' when nothing does.

    A node is free when no owner has an attempt there or would place one, and the node
    itself says that it runs nothing. One that was found lost need not say so.
    """
    if looked.lines:
        return f"{len(looked.lines)} attempts are left"
    if looked.silent:
        return f"{looked.silent} shards have no owner just now that could tell"
    if looked.unaware:
        return f"the owners of {looked.unaware} shards have not heard of the drain yet"
    if status is None:
        return "it is not known here yet"
    if status.state == "lost":
        return ""
    if status.state not in {"ready", "draining"} or status.beat_age_s > _FRESH_BEAT_S:
        return f"the node is {status.state}, its last heartbeat {status.beat_age_s:.0f} s old"
    at_work = status.running + status.queued
    return f"the node still ends {at_work} attempts" if at_work else ""
