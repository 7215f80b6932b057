"""A rack's shell: beats in, digests out, and verdicts that only the rack's owner can store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from controld.cluster import Cluster
from controld.core.liveness import RackLiveness
from controld.core.mass_loss import MassLoss, MassLossLimits
from controld.gauges import Gauges, make_gauges
from controld.losses import Losses
from controld.observer import Observer
from controld.rack import RackRunner
from controld.registry import Registry
from corefleet.adapters.memory_bus import MemoryBus, MemoryServer
from corefleet.adapters.memory_store import MemoryStore
from corefleet.background import Background
from corefleet.bus import Incoming
from corefleet.clock import SystemClock
from corefleet.codec import decode, encode
from corefleet.messages.records import ClusterSettings, LostNode, NodeRegistration, Ownership
from corefleet.messages.wire import Heartbeat, RackDigest, Verdict
from corefleet.metrics import Metrics
from corefleet.store import Changes
from corefleet.subjects import (
    LOST,
    VERDICTS,
    Layout,
    beat,
    digest,
    lost_key,
    node_key,
    rack_key,
)


@dataclass
class Rack:
    """One rack's runner with a server and a store in memory."""

    bus: MemoryBus
    store: MemoryStore
    registry: Registry
    make: Callable[[int], RackRunner]
    gauges: Gauges


@pytest.fixture
async def rack() -> AsyncIterator[Rack]:
    failures: list[BaseException] = []
    background = Background(failures.append)
    bus, store = MemoryBus(MemoryServer()), MemoryStore(SystemClock())
    cluster = Cluster("c1", ClusterSettings(), Layout(4, 1), bus, None, store, SystemClock())  # type: ignore[arg-type]
    registry = Registry(store, background)
    await registry.start()
    runners: list[RackRunner] = []
    gauges = make_gauges(Metrics())
    observer = Observer(cluster, background, gauges, bus, 0.15)
    guard = MassLoss(MassLossLimits())
    losses = Losses(cluster, background, registry, gauges, bus, guard, observer)

    def make(revision: int) -> RackRunner:
        core = RackLiveness("r1", "c1", 3)
        runner = RackRunner(
            cluster, background, registry, gauges, bus, observer, losses, core, "r1", revision
        )
        runners.append(runner)
        return runner

    yield Rack(bus, store, registry, make, gauges)
    for runner in runners:
        await runner.close()
    await registry.close()
    await background.close()
    await bus.close()
    await store.close()
    assert failures == []


async def own(rack: Rack) -> int:
    return await rack.store.put(rack_key("r1"), encode(Ownership(controld="c1", epoch=3)))


async def register(rack: Rack, port: int) -> None:
    """Register node n1 at epoch 7 with nobody at its probe's port, and let it be seen."""
    seen = asyncio.Event()

    def listener(name: str, found: NodeRegistration | None, revision: int) -> None:
        seen.set()

    rack.registry.nodes.listen(listener)
    node = NodeRegistration(node="n1", epoch=7, rack="r1", probe_address=f"127.0.0.1:{port}")
    await rack.store.put(node_key("n1"), encode(node))
    await asyncio.wait_for(seen.wait(), 5)
    rack.registry.nodes.unlisten(listener)


async def test_a_beat_shows_in_the_digest(rack: Rack, free_port: Callable[[], int]) -> None:
    heard: asyncio.Queue[Incoming] = asyncio.Queue()
    await rack.bus.subscribe(digest("r1"), heard.put_nowait)
    await register(rack, free_port())
    await rack.make(await own(rack)).start()
    rack.bus.publish(beat("r1", "n1"), b"\xc1")
    sent = Heartbeat(node="n1", rack="r1", epoch=7, number=1, running=4)
    rack.bus.publish(beat("r1", "n1"), encode(sent))
    async with asyncio.timeout(5):
        while True:
            found = decode((await heard.get()).payload, RackDigest)
            if found.nodes and found.nodes[0].running == 4:
                break
    assert (found.rack, found.controld, found.epoch) == ("r1", "c1", 3)
    assert (found.nodes[0].node, found.nodes[0].state) == ("n1", "ready")


async def test_a_silent_node_that_no_probe_finds_is_lost_for_all(
    rack: Rack, free_port: Callable[[], int]
) -> None:
    verdicts: asyncio.Queue[Incoming] = asyncio.Queue()
    await rack.bus.subscribe(VERDICTS, verdicts.put_nowait)
    await register(rack, free_port())
    marks = rack.store.watch(LOST, 0)
    await rack.make(await own(rack)).start()
    async with asyncio.timeout(5):
        verdict = decode((await verdicts.get()).payload, Verdict)
        changes = await anext(marks)
    assert (verdict.node, verdict.node_epoch, verdict.state) == ("n1", 7, "lost")
    assert isinstance(changes, Changes)
    assert changes.events[0].value is not None
    assert decode(changes.events[0].value, LostNode).epoch == 7
    await marks.aclose()


async def test_who_no_longer_owns_the_rack_stores_no_verdict(
    rack: Rack, free_port: Callable[[], int]
) -> None:
    verdicts: asyncio.Queue[Incoming] = asyncio.Queue()
    await rack.bus.subscribe(VERDICTS, verdicts.put_nowait)
    await register(rack, free_port())
    stale = await own(rack)
    await rack.store.put(rack_key("r1"), encode(Ownership(controld="c2", epoch=4)))
    runner = rack.make(stale)
    await runner.start()
    await asyncio.wait_for(verdicts.get(), 5)
    await runner.close()
    assert await rack.store.get(lost_key("n1")) is None
