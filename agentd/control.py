"""What the control plane says to this node, and the node's registration with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Protocol

import msgspec
import structlog

from corefleet.bus import Bus, Incoming
from corefleet.codec import decode, encode
from corefleet.errors import CorruptRecord, Unavailable
from corefleet.messages.records import NodeRegistration, PoolSpec
from corefleet.messages.wire import (
    AssignAnswer,
    AssignAnswers,
    AssignBatch,
    DropAttempt,
    InventoryAnswer,
    InventoryQuery,
    NodeRegistered,
    PoolsChanged,
    RegisterNode,
    Verdict,
    YieldAttempt,
)
from corefleet.subjects import (
    POOLS_CHANGED,
    VERDICTS,
    control_register,
    digest,
    node_assign,
    node_drop,
    node_inventory,
    node_yield,
)

_ANSWER_S = 2.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0

_log = structlog.get_logger(__name__)


class Commands(Protocol):
    """Who carries out what the control plane says."""

    def assign(self, batch: AssignBatch) -> list[AssignAnswer]:
        """Accept or refuse each attempt."""

    def drop(self, drop: DropAttempt) -> None: ...

    def yield_back(self, asked: YieldAttempt) -> None:
        """Give the attempt back at its next step boundary."""

    def inventory(self, query: InventoryQuery) -> InventoryAnswer: ...

    def lost(self, epoch: int, reason: str) -> None:
        """Some epoch of this node was found lost."""

    def pools(self, pools: tuple[PoolSpec, ...], revision: int) -> None:
        """These are all pools."""


class Control:
    """The node's subscriptions. What does not decode is reported and dropped."""

    def __init__(self, bus: Bus, node: str, rack: str, commands: Commands) -> None:
        self._bus = bus
        self._node = node
        self._rack = rack
        self._commands = commands
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Listen; assignments can come as soon as the node is registered."""
        handlers: dict[str, Callable[[Incoming], None]] = {
            node_assign(self._node): self._assign,
            node_drop(self._node): self._drop,
            node_yield(self._node): self._yield,
            node_inventory(self._node): self._inventory,
            VERDICTS: self._verdict,
            digest(self._rack): self._digest,
            POOLS_CHANGED: self._pools,
        }
        for subject, handler in handlers.items():
            subscription = await self._bus.subscribe(subject, _survives(handler))
            self._open.push_async_callback(subscription.close)

    async def close(self) -> None:
        """Listen no more. Idempotent."""
        await self._open.aclose()

    async def register(self, registration: NodeRegistration) -> NodeRegistered:
        """Register until a controld takes it; its answer has the node's epoch."""
        payload = encode(RegisterNode(registration=registration))
        subject = control_register(registration.node)
        pause = _FIRST_PAUSE_S
        while True:
            try:
                answer = await self._bus.request(subject, payload, _ANSWER_S)
                registered = decode(answer, NodeRegistered)
                if not registered.error:
                    return registered
                reason = registered.error
            except (Unavailable, CorruptRecord) as error:
                reason = str(error)
            _log.warning("Not registered yet", reason=reason, again_in_s=round(pause, 1))
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    def _assign(self, message: Incoming) -> None:
        answers = self._commands.assign(decode(message.payload, AssignBatch))
        self._bus.publish(message.reply, encode(AssignAnswers(items=tuple(answers))))

    def _drop(self, message: Incoming) -> None:
        self._commands.drop(decode(message.payload, DropAttempt))

    def _yield(self, message: Incoming) -> None:
        self._commands.yield_back(decode(message.payload, YieldAttempt))

    def _inventory(self, message: Incoming) -> None:
        answer = self._commands.inventory(decode(message.payload, InventoryQuery))
        self._bus.publish(message.reply, encode(answer))

    def _verdict(self, message: Incoming) -> None:
        verdict = decode(message.payload, Verdict)
        lost = verdict.state == "lost" and not verdict.provisional
        if verdict.node == self._node and lost:
            self._commands.lost(verdict.node_epoch, verdict.reason or "a verdict said so")

    def _digest(self, message: Incoming) -> None:
        """Digests repeat verdicts, for who was cut off when one was given."""
        for view in decode(message.payload, _NarrowDigest).nodes:
            if view.node == self._node and view.state == "lost" and not view.provisional:
                self._commands.lost(view.epoch, "a digest of its rack said so")

    def _pools(self, message: Incoming) -> None:
        changed = decode(message.payload, PoolsChanged)
        self._commands.pools(changed.pools, changed.pools_revision)


class _NarrowView(msgspec.Struct):
    """The part of a NodeView that concerns us: the rest is not even decoded."""

    node: str
    epoch: int
    state: str = "ready"
    provisional: bool = False


class _NarrowDigest(msgspec.Struct):
    nodes: tuple[_NarrowView, ...] = ()


def _survives(handler: Callable[[Incoming], None]) -> Callable[[Incoming], None]:
    def handle(message: Incoming) -> None:
        try:
            handler(message)
        except CorruptRecord as error:
            _log.warning("Message dropped", subject=message.subject, reason=str(error))

    return handle
