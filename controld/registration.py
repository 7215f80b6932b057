"""Nodes join here: any controld answers, the store fixes the node's epoch."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import msgspec
import structlog

from controld.cluster import Cluster
from controld.registry import Registry
from corefleet.background import Background, stop
from corefleet.bus import Incoming
from corefleet.codec import decode, encode
from corefleet.errors import CorefleetError, CorruptRecord, InvalidInput, Unavailable
from corefleet.ids import check_name
from corefleet.messages.records import LostNode, NodeRegistration, PoolSpec
from corefleet.messages.wire import NodeRegistered, PoolsChanged, RegisterNode
from corefleet.store import Compare, Delete, KeyValue, Put
from corefleet.subjects import (
    CONTROL_QUEUE,
    CONTROL_REGISTER,
    POOLS,
    POOLS_CHANGED,
    lost_key,
    name_in_key,
    node_key,
    pool_key,
    sender_of,
)

_log = structlog.get_logger(__name__)

_TRIES = 5
_REPEAT_POOLS_S = 10.0


class Registrar:
    """Answers nodes that register, and tells nodes of pools."""

    def __init__(self, cluster: Cluster, registry: Registry, background: Background) -> None:
        self._cluster = cluster
        self._registry = registry
        self._background = background
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Begin to answer."""
        subscription = await self._cluster.bus.subscribe(
            CONTROL_REGISTER, self._asked, queue=CONTROL_QUEUE
        )
        self._open.push_async_callback(subscription.close)
        repeating = self._background.spawn(self._repeat_pools(), "repeat pools")
        self._open.push_async_callback(stop, repeating)

    async def close(self) -> None:
        """Stop answering. Idempotent."""
        await self._open.aclose()

    async def register(self, asked: NodeRegistration) -> NodeRegistered:
        """Give the node its next epoch, or again the one that it resumes.

        A node that names an epoch resumes it when that is its newest and was not found lost:
        its attempts were adopted. Raises InvalidInput, Unavailable.
        """
        check_name("node", asked.node)
        check_name("rack", asked.rack)
        store = self._cluster.store
        key = node_key(asked.node)
        for _ in range(_TRIES):
            known = await store.get(key)
            lost = await store.get(lost_key(asked.node))
            before = decode(known.value, NodeRegistration) if known else None
            previous = before.epoch if before else 0
            if lost:
                previous = max(previous, decode(lost.value, LostNode).epoch)
            resumes = 0 < asked.epoch == previous and not lost
            epoch = previous if resumes else previous + 1
            made = msgspec.structs.replace(
                asked, epoch=epoch, draining_since_ms=self._draining_since_ms(asked, before)
            )
            compares = [Compare(key, known.mod_revision if known else 0)]
            operations: list[Put | Delete] = [Put(key, encode(made))]
            if lost:
                compares.append(Compare(lost.key, lost.mod_revision))
                operations.append(Delete(lost.key))
            try:
                if (await store.commit(compares, operations)).succeeded:
                    return await self._welcome(made)
            except Unavailable as error:
                # Whether it was written or not, the next try takes a higher epoch.
                _log.warning("registration is repeated", node=asked.node, error=str(error))
        raise Unavailable(f"node {asked.node}: the store did not take the registration")

    def _draining_since_ms(self, asked: NodeRegistration, before: NodeRegistration | None) -> int:
        """Return since when the node asks to be drained: by our clock, as its own may be wrong."""
        if not asked.draining:
            return 0
        since_ms = before.draining_since_ms if before is not None and before.draining else 0
        return since_ms or self._cluster.clock.wall_ms()

    async def apply_pool(self, spec: PoolSpec) -> int:
        """Write the pool, tell all nodes; return its revision. Raises Unavailable."""
        revision = await self._cluster.store.put(pool_key(spec.name), encode(spec))
        await self._tell_pools()
        return revision

    async def _welcome(self, made: NodeRegistration) -> NodeRegistered:
        pools, revision = await self._pools()
        settings = self._cluster.settings
        _log.info("node registered", node=made.node, rack=made.rack, epoch=made.epoch)
        return NodeRegistered(
            epoch=made.epoch,
            shards=settings.shards,
            streams=settings.streams,
            pools=pools,
            pools_revision=revision,
        )

    def _asked(self, message: Incoming) -> None:
        self._background.spawn(self._answer(message))

    async def _answer(self, message: Incoming) -> None:
        try:
            asked = decode(message.payload, RegisterNode).registration
            if asked.node != (sender := sender_of(message.subject)):
                raise InvalidInput("node", asked.node, f"{sender}, which registers")
            answer = await self.register(asked)
        except (InvalidInput, CorruptRecord, Unavailable) as error:
            _log.warning("registration refused", error=str(error))
            answer = NodeRegistered(epoch=0, shards=0, streams=0, error=str(error))
        self._cluster.bus.publish(message.reply, encode(answer))

    async def _repeat_pools(self) -> None:
        """Tell the pools again now and then: a node may have missed the change."""
        while True:
            await asyncio.sleep(_REPEAT_POOLS_S)
            if self._registry.shard_owner(0) == self._cluster.controld:
                try:
                    await self._tell_pools()
                except CorefleetError as error:
                    _log.warning("pools not repeated", error=str(error))

    async def _tell_pools(self) -> None:
        pools, revision = await self._pools()
        self._cluster.bus.publish(
            POOLS_CHANGED, encode(PoolsChanged(pools=pools, pools_revision=revision))
        )

    async def _pools(self) -> tuple[tuple[PoolSpec, ...], int]:
        entries, _ = await self._cluster.store.range(POOLS)
        return tuple(_pool(entry) for entry in entries), max(
            (entry.mod_revision for entry in entries), default=0
        )


def _pool(entry: KeyValue) -> PoolSpec:
    try:
        return decode(entry.value, PoolSpec)
    except CorruptRecord as error:
        raise CorruptRecord(f"pool {name_in_key(entry.key)}: {error}") from error
