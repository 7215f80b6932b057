"""Simulated networks: routes with delays, losses and cuts, and TCP for probes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from tests.sim.loop import Process, World

BASE_DELAY_S = 0.0002
MEAN_DELAY_S = 0.0005
_HANDSHAKE_S = 0.0005


class Route:
    """One direction between a process and a server.

    Messages of one flow stay in order, those of different flows need not. A cut holds what
    is sent, as TCP does: `heal` lets it through late, `reset` loses it.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._rng = world.rng(f"route {name}")
        self._last: dict[str, float] = {}
        self._held: list[tuple[str, Callable[..., object], tuple[Any, ...]]] = []
        self._generation = 0
        self.cut = False
        self.slow_s = 0.0
        self.loss = 0.0

    def send(
        self, flow: str, callback: Callable[..., object], *args: Any, sure: bool = False
    ) -> None:
        """Carry a message; `sure` ones are not lost at random (TCP, or a stream's own retry)."""
        if self.cut:
            self._held.append((flow, callback, args))
            return
        rng = self._rng
        if self.loss and not sure and rng.random() < self.loss:
            return
        delay = BASE_DELAY_S + rng.expovariate(1 / (MEAN_DELAY_S + self.slow_s))
        when = max(self._world.now + delay, self._last.get(flow, 0.0))
        self._last[flow] = when
        self._world.at(when, self._arrive, self._generation, callback, args)

    def _arrive(
        self, generation: int, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        if generation == self._generation:
            callback(*args)

    def heal(self) -> None:
        """Let through what was held."""
        self.cut = False
        held, self._held = self._held, []
        for flow, callback, args in held:
            self.send(flow, callback, *args, sure=True)

    def reset(self) -> None:
        """Lose what is under way."""
        self._generation += 1
        self._held.clear()
        self._last.clear()


class Wires:
    """TCP between processes: enough of it for a port that answers probes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng("wires")
        self._ports: dict[int, tuple[Process, Callable[[], Any]]] = {}
        self._next = 20_000
        self.cut: set[tuple[str, str]] = set()
        """Pairs (from, to) of process names between which nothing passes."""

    def listen(self, process: Process, factory: Callable[[], Any], host: str) -> _Listener:
        self._next += 1
        self._ports[self._next] = (process, factory)
        return _Listener(self, host, self._next)

    def close(self, port: int) -> None:
        self._ports.pop(port, None)

    async def connect(
        self, process: Process, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[Any, Any]:
        """Connect; hangs where nothing passes and raises OSError where nobody listens."""
        await asyncio.sleep(_HANDSHAKE_S + self.delay_s())
        server, make = self._ports.get(port, (None, None))
        if server is None or make is None or not self.passes(process.name, server.name):
            if self._rng.random() < 0.5 and server is None:
                raise ConnectionRefusedError(f"{host}:{port}: connection refused")
            await asyncio.get_running_loop().create_future()
        assert server is not None
        assert make is not None
        if not server.alive:
            if self._rng.random() < 0.5:
                raise ConnectionRefusedError(f"{host}:{port}: connection refused")
            await asyncio.get_running_loop().create_future()
        near, far = _Transport(self, process), _Transport(self, server)
        near.peer, far.peer = far, near
        near.protocol = factory()
        near.protocol.connection_made(near)
        server.deliver(far.accept, make)
        return near, near.protocol

    def passes(self, one: str, other: str) -> bool:
        return (one, other) not in self.cut and (other, one) not in self.cut

    def delay_s(self) -> float:
        return BASE_DELAY_S + self._rng.expovariate(1 / MEAN_DELAY_S)

    def carry(self, sender: _Transport, data: bytes | None) -> None:
        """Take data (None: the end) to the other side."""
        peer = sender.peer
        if peer is None or not self.passes(sender.process.name, peer.process.name):
            return
        when = max(self._world.now + self.delay_s(), peer.last)
        peer.last = when
        self._world.at(when, peer.process.deliver, peer.receive, data)


class _Listener:
    """What asyncio calls a Server."""

    def __init__(self, wires: Wires, host: str, port: int) -> None:
        self._wires = wires
        self._name = (host, port)
        self.sockets = (self,)

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        self._wires.close(self._name[1])

    async def wait_closed(self) -> None:
        return


class _Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, wires: Wires, process: Process) -> None:
        super().__init__()
        self._wires = wires
        self.process = process
        self.peer: _Transport | None = None
        self.protocol: Any = None
        self.last = 0.0
        self._closing = False
        self._early: list[bytes | None] = []

    def accept(self, make: Callable[[], Any]) -> None:
        self.protocol = make()
        self.protocol.connection_made(self)
        early, self._early = self._early, []
        for data in early:
            self.receive(data)

    def receive(self, data: bytes | None) -> None:
        if self.protocol is None:
            self._early.append(data)
        elif self._closing:
            return
        elif data is None:
            self.protocol.eof_received()
            self.close()
        else:
            self.protocol.data_received(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self._wires.carry(self, bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._wires.carry(self, None)
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """What is read is small."""

    def resume_reading(self) -> None:
        """What is read is small."""


def drawn(rng: random.Random, low: float, high: float) -> float:
    """Return a float drawn evenly from [low, high)."""
    return low + (high - low) * rng.random()
