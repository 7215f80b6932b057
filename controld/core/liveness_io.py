"""What goes into a rack's liveness core and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from corefleet.messages.records import LostNode, NodeRegistration
from corefleet.messages.wire import Heartbeat, RackDigest, Verdict


@dataclass(slots=True, frozen=True)
class NodeRegisteredEvent:
    """A node's registration was seen in the store (also at take-over: with a full deadline)."""

    registration: NodeRegistration


@dataclass(slots=True, frozen=True)
class NodeRemoved:
    node: str


@dataclass(slots=True, frozen=True)
class LostSeen:
    """A verdict stands in the store: ours, or that of an owner before us (rule 8)."""

    lost: LostNode


@dataclass(slots=True, frozen=True)
class BeatReceived:
    beat: Heartbeat


@dataclass(slots=True, frozen=True)
class ProbeAnswered:
    """A probe ended: `alive` when the node's own port answered."""

    node: str
    node_epoch: int
    alive: bool


@dataclass(slots=True, frozen=True)
class BusConnection:
    """Whether our own NATS connection stands: without it we give no verdict (rule 10)."""

    connected: bool


@dataclass(slots=True, frozen=True)
class LivenessTick:
    pass


LivenessEvent = (
    NodeRegisteredEvent
    | NodeRemoved
    | LostSeen
    | BeatReceived
    | ProbeAnswered
    | BusConnection
    | LivenessTick
)


@dataclass(slots=True, frozen=True)
class Probe:
    """Ask the node's own TCP port. Answered by ProbeAnswered within the probe's deadline."""

    node: str
    node_epoch: int
    address: str


@dataclass(slots=True, frozen=True)
class PublishDigest:
    digest: RackDigest


@dataclass(slots=True, frozen=True)
class PushVerdict:
    """Publish at once."""

    verdict: Verdict


@dataclass(slots=True, frozen=True)
class StoreLost:
    """Write the verdict to the store, so that it is a level and not an edge (rule 8)."""

    lost: LostNode


LivenessAction = Probe | PublishDigest | PushVerdict | StoreLost
