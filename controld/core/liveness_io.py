"""What goes into a rack's liveness core and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from corefleet.messages.records import LostNode, NodeRegistration
from corefleet.messages.wire import Heartbeat, RackDigest, Verdict

Found = Literal["alive", "nobody", "unable"]
"""What a look at a node's own port found; `unable`: it could not look, and that says nothing."""


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
    """Our own probe ended."""

    node: str
    node_epoch: int
    found: Found


@dataclass(slots=True, frozen=True)
class Observed:
    """A second look ended; `unable` when the observer gave no answer, or could not look."""

    node: str
    node_epoch: int
    observer: str
    found: Found


@dataclass(slots=True, frozen=True)
class PeersSeen:
    """All living controlds but ourselves; `preferred` are those that own another rack."""

    preferred: tuple[str, ...]
    others: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class LossHeld:
    """The mass-loss guard holds our verdict: it is not stored until most controlds agree."""

    node: str
    node_epoch: int


@dataclass(slots=True, frozen=True)
class LossDecided:
    """Most controlds looked themselves: the node is lost (`agreed`), or it is not."""

    node: str
    node_epoch: int
    agreed: bool


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
    | Observed
    | PeersSeen
    | LossHeld
    | LossDecided
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
class Observe:
    """Ask another controld for a second look. Answered by Observed within the same deadline."""

    node: str
    node_epoch: int
    address: str
    observer: str


@dataclass(slots=True, frozen=True)
class SuspicionOver:
    """A node that was suspect for its silence beats again, with no verdict given."""

    node: str


@dataclass(slots=True, frozen=True)
class PublishDigest:
    digest: RackDigest


@dataclass(slots=True, frozen=True)
class PushVerdict:
    """Publish at once. A verdict that a node only hears again has no `silence_s`."""

    verdict: Verdict
    silence_s: float | None = None


@dataclass(slots=True, frozen=True)
class StoreLost:
    """Write the verdict to the store, so that it is a level and not an edge (rule 8).

    Unless most controlds agreed on it already, the mass-loss guard is asked first.
    """

    lost: LostNode
    agreed: bool = False


LivenessAction = Probe | Observe | SuspicionOver | PublishDigest | PushVerdict | StoreLost
