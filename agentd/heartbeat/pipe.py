"""What agentd writes to its heartbeat program: lines of JSON, a Setup, then Statuses."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from corefleet.config import LogConfig, NatsConfig
from corefleet.errors import CorruptRecord
from corefleet.messages.wire import SlotUse, SlowTask

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


def line_of(message: Setup | Status) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def read_line(line: bytes, kind: type[L]) -> L:
    """Return what a line holds; raises CorruptRecord."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"{kind.__name__}: {error} in a line of {len(line)} bytes") from error
