"""What every part of a controld is given: who it is, and its ways to the world."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from corefleet.bus import Bus, Log
from corefleet.clock import Clock
from corefleet.messages.records import ClusterSettings
from corefleet.store import Store
from corefleet.subjects import Layout


@dataclass(frozen=True, slots=True)
class Cluster:
    """One controld's place in its cluster."""

    controld: str
    settings: ClusterSettings
    layout: Layout
    bus: Bus
    log: Log
    store: Store
    clock: Clock
    chance: random.Random = field(default_factory=random.Random)
    """What its cores draw from."""
