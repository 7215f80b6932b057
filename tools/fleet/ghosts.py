"""Controlds that are there for the others only: members that watch racks and own no shards.

With them, one real controld can be measured as one of a hundred: it owns its hundredth of
racks and shards, and hears the digests of all the other racks. The racks' watch is the
real core.
"""

from __future__ import annotations

import asyncio

from controld.core.liveness import RackLiveness
from controld.core.liveness_io import (
    BeatReceived,
    LivenessTick,
    NodeRegisteredEvent,
    PublishDigest,
)
from controld.core.rendezvous import rightful_owner
from corefleet.adapters.etcd_store import EtcdStore
from corefleet.adapters.nats_bus import NatsBus
from corefleet.background import stop
from corefleet.bus import Incoming
from corefleet.clock import SystemClock
from corefleet.codec import decode, encode
from corefleet.config import EtcdConfig, NatsConfig
from corefleet.messages.records import ControldRegistration, NodeRegistration
from corefleet.messages.wire import Heartbeat
from corefleet.store import Put
from corefleet.subjects import CONTROLDS, NODES, beats, controld_key, digest, name_in_key

_TTL_S = 10.0
_TICK_S = 0.05


class Ghosts:
    """`count` members whose racks are watched in this process. Close it to let them go."""

    def __init__(self, nats: str, etcd: str, count: int) -> None:
        self._nats = nats
        self._etcd = etcd
        self._names = [f"ghost-{number:03d}" for number in range(count)]
        self._racks: dict[str, RackLiveness] = {}
        self._clock = SystemClock()
        self._failures: list[Exception] = []
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Register, and watch the racks that are theirs; return how many those are."""
        self._store = await EtcdStore.connect(EtcdConfig(endpoints=(self._etcd,)))
        config = NatsConfig(servers=(self._nats,))
        self._bus = await NatsBus.connect(config, "ghosts", self._failures.append)
        # Peers hold connections to members: one listener stands for all.
        self._port = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        host, port = self._port.sockets[0].getsockname()[:2]
        lease = await self._store.lease(_TTL_S)
        for name in self._names:
            made = ControldRegistration(controld=name, address=f"{host}:{port}")
            await self._store.commit([], [Put(controld_key(name), encode(made), lease.id)])
        members = [name_in_key(entry.key) for entry in (await self._store.range(CONTROLDS))[0]]
        for entry in (await self._store.range(NODES))[0]:
            self._add(decode(entry.value, NodeRegistration), members)
        for rack in self._racks:
            await self._bus.subscribe(beats(rack), self._beat)
        self._ticking = asyncio.create_task(self._tick(), name="ghosts' racks")
        return len(self._racks)

    async def close(self) -> None:
        """Let them all go."""
        await stop(self._ticking)
        self._port.close()
        await self._bus.close()
        await self._store.close()

    def _add(self, node: NodeRegistration, members: list[str]) -> None:
        owner = rightful_owner(f"rack/{node.rack}", members)
        if owner not in self._names:
            return
        core = self._racks.get(node.rack)
        if core is None:
            core = self._racks[node.rack] = RackLiveness(node.rack, owner, 1)
        core.handle(NodeRegisteredEvent(node), self._clock.monotonic(), self._clock.wall_ms())

    def _beat(self, message: Incoming) -> None:
        heard = decode(message.payload, Heartbeat)
        now, wall_ms = self._clock.monotonic(), self._clock.wall_ms()
        self._racks[heard.rack].handle(BeatReceived(heard), now, wall_ms)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now, wall_ms = self._clock.monotonic(), self._clock.wall_ms()
            for rack, core in self._racks.items():
                for action in core.handle(LivenessTick(), now, wall_ms):
                    if isinstance(action, PublishDigest):
                        self._bus.publish(digest(rack), encode(action.digest))
