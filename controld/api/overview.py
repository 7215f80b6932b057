"""What is known of the whole as protobuf messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from controld.core.overview import FleetTally
from controld.overview import Overview, Seen
from controld.registry import Registry
from corefleet.messages.wire import ControldOverview
from corefleet.metrics import LATENCY_BUCKETS_S
from corefleet.rpc import fleet_pb2

_CONTROLDS_A_TURN = 8


async def overview(controld: str, registry: Registry, asked: Overview) -> fleet_pb2.OverviewReply:
    """Ask all controlds; return what they tell, rendered in portions."""
    seen = await asked.look()
    racks: dict[str, int] = {}
    for owned in registry.racks.records.values():
        racks[owned.controld] = racks.get(owned.controld, 0) + 1
    reply = fleet_pb2.OverviewReply(
        controld=controld,
        at_ms=seen.at_ms,
        nodes=nodes(seen.nodes),
        wait_bounds_s=LATENCY_BUCKETS_S,
    )
    for count, name in enumerate(seen.living):
        reply.controlds.append(one(name, seen, racks))
        if count % _CONTROLDS_A_TURN == _CONTROLDS_A_TURN - 1:
            await asyncio.sleep(0)
    return reply


def nodes(tally: FleetTally) -> fleet_pb2.NodesOverview:
    """Return the nodes summed up."""
    return fleet_pb2.NodesOverview(
        states=tally.states,
        slots_used=tally.places.used,
        slots_total=tally.places.total,
        balance=tally.places.balance,
        pools=[
            fleet_pb2.PoolPlaces(
                pool=pool,
                nodes=places.nodes,
                slots_used=places.used,
                slots_total=places.total,
                balance=places.balance,
            )
            for pool, places in sorted(tally.pools.items())
        ],
    )


def one(name: str, seen: Seen, racks: Mapping[str, int]) -> fleet_pb2.ControldOverview:
    """Return one controld, with what it told if it did."""
    told = seen.answers.get(name)
    if told is None:
        return fleet_pb2.ControldOverview(controld=name, racks=racks.get(name, 0))
    return _told(told, racks.get(name, 0))


def _told(told: ControldOverview, racks: int) -> fleet_pb2.ControldOverview:
    return fleet_pb2.ControldOverview(
        controld=told.controld,
        answered=True,
        started_ms=told.started_ms,
        at_ms=told.at_ms,
        shards=told.shards,
        racks=racks,
        loop_lag_s=told.loop_lag_s,
        cpu_s=told.cpu_s,
        pools=[
            fleet_pb2.PoolCounts(
                pool=counts.pool,
                queued=counts.queued,
                in_flight=counts.in_flight,
                placed=counts.placed,
                finished=counts.finished,
                not_admitted=counts.not_admitted,
                home=counts.home,
                requeued=counts.requeued,
                waits=counts.waits,
            )
            for counts in told.pools
        ],
    )
