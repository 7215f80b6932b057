"""Thousands of simulated nodes in one process, on a real NATS."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import msgspec

from agentd.probe_port import ProbePort
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_log import NatsLog
from corefleet.background import Background, stop
from corefleet.bus import Incoming, Subscription
from corefleet.codec import decode, encode
from corefleet.config import NatsConfig
from corefleet.errors import AttemptDropped, InvalidInput, NoResponders, Timeout, Unavailable
from corefleet.ids import shard_of_task
from corefleet.messages.wire import (
    AssignAnswers,
    AssignBatch,
    Assignment,
    DropAttempt,
    InventoryQuery,
    NodeRegistered,
    RegisterNode,
    TaskReturned,
    YieldAttempt,
)
from corefleet.subjects import (
    Layout,
    beat,
    control_register,
    node_assign,
    node_drop,
    node_inventory,
    node_yield,
    shard_returned,
)
from tools.fleet.attempt import Attempt
from tools.fleet.node import SimNode
from tools.fleet.plan import Durations, Shape

_ANY_PORT = "127.0.0.1:0"
_REGISTER_S = 10.0
_GIVE_UP_S = 60.0
_REGISTER_AT_ONCE = 64
_TICKS_A_BEAT = 20
"""Beats are spread over the interval in so many portions."""
_RETRY_S = 0.1


@dataclass(slots=True)
class Tally:
    """What happened since the start."""

    counts: Counter[str] = field(default_factory=Counter)
    beats_late_s: float = 0.0
    """How late the worst portion of beats was: the simulator's own limit shows here."""


class SimFleet:
    """All simulated nodes of this process."""

    def __init__(
        self,
        url: str,
        shape: Shape,
        slots: dict[str, int],
        durations: Durations,
        beat_interval_s: float,
        seed: int = 0,
    ) -> None:
        if beat_interval_s <= 0:
            raise InvalidInput("beat_interval_s", beat_interval_s, "more than 0")
        self._url = url
        self._durations = durations
        self._interval_s = beat_interval_s
        self._rng = Random(seed)
        self.nodes = {name: SimNode(name, rack, slots) for name, rack in shape.names()}
        self._ports = {
            node.name: ProbePort(node.name, lambda node=node: node.epoch)  # type: ignore[misc]
            for node in self.nodes.values()
        }
        self._failures: list[BaseException] = []
        self._background = Background(self._failures.append)
        self._running: dict[int, tuple[Attempt, asyncio.Task[None]]] = {}
        """By the assignment's identity: a task may be here twice after its node came back."""
        self._subscriptions: list[Subscription] = []
        self._buses: list[NatsBus] = []
        self._beating: asyncio.Task[None] | None = None
        self.tally = Tally()

    async def start(self) -> None:
        """Connect, register all nodes, and begin to beat. Raises Unavailable."""
        config = NatsConfig(servers=(self._url,))
        for name in ("fleet", "fleet beats"):
            self._buses.append(await NatsBus.connect(config, name, self._failures.append))
        self._bus, self._beats = self._buses
        self._log = NatsLog(self._bus)
        for subject, handler in (
            (node_assign("*"), self._assigned),
            (node_drop("*"), self._dropped),
            (node_yield("*"), self._yield),
            (node_inventory("*"), self._inventory),
        ):
            self._subscriptions.append(await self._bus.subscribe(subject, handler))
        self._beating = self._background.spawn(self._beat_all(), "beats")
        await self.revive(list(self.nodes))

    async def close(self) -> None:
        """End all; nodes just vanish. Raises what a part of the simulation died of."""
        await stop(self._beating)
        for subscription in self._subscriptions:
            await subscription.close()
        await self._background.close()
        await asyncio.gather(*(port.close() for port in self._ports.values()))
        for bus in self._buses:
            await bus.close()
        if self._failures:
            raise self._failures[0]

    def named(self, name: str) -> list[str]:
        """Return the nodes that a node's or a rack's name stands for; raises InvalidInput."""
        found = [node.name for node in self.nodes.values() if name in (node.name, node.rack)]
        if not found:
            raise InvalidInput("node", name, "the name of a node or of a rack")
        return found

    async def kill(self, names: list[str]) -> None:
        """Let nodes die as machines do: silent, their ports closed, nothing written any more."""
        for name in names:
            node = self.nodes[name]
            for item in node.die():
                _, task = self._running.pop(id(item))
                task.cancel()
                self.tally.counts["died"] += 1
        await asyncio.gather(*(self._ports[name].close() for name in names))

    async def revive(self, names: list[str]) -> None:
        """Register nodes, with new epochs, and let them beat. Raises Unavailable."""
        gate = asyncio.Semaphore(_REGISTER_AT_ONCE)

        async def one(name: str) -> None:
            async with gate:
                await self._register(self.nodes[name])

        await asyncio.gather(*(one(name) for name in names))

    async def set_draining(self, names: list[str], on: bool) -> None:
        """Let nodes ask to be drained, as those do whose health gets worse."""
        for name in names:
            self.nodes[name].draining = on
        await self.revive(names)

    def held(self) -> int:
        """Return how many attempts run now."""
        return len(self._running)

    async def _register(self, node: SimNode) -> None:
        port = self._ports[node.name]
        if node.life != "alive":
            await port.start(port.address or _ANY_PORT)
        registration = node.registration(port.address, time.time_ns() // 1_000_000)
        if node.life == "alive":
            # The same life goes on: it names its epoch.
            registration = msgspec.structs.replace(registration, epoch=node.epoch)
        payload = encode(RegisterNode(registration=registration))
        give_up = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                answer = await self._bus.request(control_register(node.name), payload, _REGISTER_S)
                registered = decode(answer, NodeRegistered)
                why = registered.error
            except (NoResponders, Timeout) as error:
                why = str(error)
            if not why:
                break
            if time.monotonic() > give_up:
                raise Unavailable(f"node {node.name} cannot register: {why}")
            await asyncio.sleep(_RETRY_S)
        self._layout = Layout(registered.shards, registered.streams)
        node.epoch = registered.epoch
        node.life = "alive"
        node.number = 0

    async def _beat_all(self) -> None:
        portions = [
            list(self.nodes.values())[start::_TICKS_A_BEAT] for start in range(_TICKS_A_BEAT)
        ]
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            for portion in portions:
                wall_ms = time.time_ns() // 1_000_000
                for node in portion:
                    if node.life == "alive":
                        self._beats.publish(beat(node.rack, node.name), encode(node.beat(wall_ms)))
                        self.tally.counts["beats"] += 1
                due += self._interval_s / _TICKS_A_BEAT
                late = loop.time() - due
                self.tally.beats_late_s = max(self.tally.beats_late_s, late)
                await asyncio.sleep(max(0.0, -late))

    def _node_of(self, message: Incoming) -> SimNode | None:
        node = self.nodes.get(message.subject.split(".")[2])
        return node if node is not None and node.life == "alive" else None

    def _assigned(self, message: Incoming) -> None:
        node = self._node_of(message)
        if node is None:
            return
        answers = []
        for item in decode(message.payload, AssignBatch).items:
            answer, runs = node.assigned(item)
            answers.append(answer)
            self.tally.counts["accepted" if answer.accepted else "refused"] += 1
            if runs:
                self._start(node, item)
        self._bus.publish(message.reply, encode(AssignAnswers(items=tuple(answers))))

    def _start(self, node: SimNode, item: Assignment) -> None:
        attempt = Attempt(self._bus, self._log, self._layout, item, _wall_ms)
        task = self._background.spawn(self._run(node, item, attempt))
        self._running[id(item)] = (attempt, task)

    async def _run(self, node: SimNode, item: Assignment, attempt: Attempt) -> None:
        try:
            done = await attempt.run(self._durations, self._rng)
        except AttemptDropped:
            self.tally.counts["dropped"] += 1
        except Unavailable as error:
            self._give_back(node, item, f"node {node.name}: {error}")
        else:
            if done:
                self.tally.counts["finished"] += 1
            else:
                self._give_back(node, item, attempt.yielding)
        self._running.pop(id(item), None)
        node.over(item)

    def _give_back(self, node: SimNode, item: Assignment, reason: str) -> None:
        self.tally.counts["returned"] += 1
        record = item.record
        returned = TaskReturned(
            task=record.task,
            attempt=record.attempt,
            node=node.name,
            node_epoch=node.epoch,
            reason=reason,
        )
        self._bus.publish(shard_returned(shard_of_task(record.task), node.name), encode(returned))

    def _dropped(self, message: Incoming) -> None:
        node = self._node_of(message)
        if node is None:
            return
        drop = decode(message.payload, DropAttempt)
        item = node.holds(drop.task, drop.attempt)
        if item is not None:
            node.over(item)
            _, task = self._running.pop(id(item))
            task.cancel()
            self.tally.counts["dropped"] += 1

    def _yield(self, message: Incoming) -> None:
        node = self._node_of(message)
        if node is None:
            return
        asked = decode(message.payload, YieldAttempt)
        item = node.holds(asked.task, asked.attempt)
        if item is not None:
            attempt, _ = self._running[id(item)]
            attempt.yielding = asked.reason
            self.tally.counts["asked to yield"] += 1

    def _inventory(self, message: Incoming) -> None:
        node = self._node_of(message)
        if node is not None:
            query = decode(message.payload, InventoryQuery)
            self._bus.publish(message.reply, encode(node.inventory(query)))


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
