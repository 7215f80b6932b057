"""What agentd and its heartbeat program tell each other in lines of JSON.

agentd: a Setup, then Statuses. The program: a Word when NATS is reached, then one a second.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from corefleet.config import LogConfig, NatsConfig
from corefleet.errors import CorruptRecord
from corefleet.messages.wire import LoadVector, SlotUse, SlowTask

MOST_LINE_BYTES = 4 * 1024 * 1024

L = TypeVar("L")


class Setup(msgspec.Struct, frozen=True):
    """The first line."""

    node: str
    rack: str
    nats: NatsConfig
    log: LogConfig
    interval_s: float
    cpus: tuple[int, ...]
    """CPUs whose load is that of the node."""


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the node stands; a new one several times a second. `epoch` 0: not registered."""

    number: int
    epoch: int = 0
    running: int = 0
    queued: int = 0
    slots: tuple[SlotUse, ...] = ()
    slow: tuple[SlowTask, ...] = ()
    sensed: LoadVector = LoadVector()
    """What the bandwidth program measures; the rest is measured by the heartbeat itself."""
    restart_grace_s: float = 0.0
    """agentd ends to be started again, and expects to be back within this."""


class Word(msgspec.Struct, frozen=True):
    """The program has reached NATS, and has sent so many beats since its last word."""

    sent: int = 0


def line_of(message: Setup | Status | Word) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read_line(line: bytes, kind: type[L]) -> L:
    """Return what a line holds; raises CorruptRecord."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"{kind.__name__}: {error} in a line of {len(line)} bytes") from error
