"""What happens in a run, as data: sizes, work and faults, all drawn from one seed up front.

A plan can be made smaller and run again: that is how a failing seed shrinks.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from tests.sim.wires import drawn

FaultKind = Literal[
    "crash",  # a process vanishes and is started again `lasts` later
    "restart",  # it ends in good order and is started again
    "freeze",  # its loop does not turn for so long
    "machine",  # a node with all that is on it vanishes
    "machine_freeze",  # a node with all that is on it stands still
    "worker",  # a worker of a node dies
    "rack",  # all nodes of a rack vanish
    "mute",  # a process reaches NATS no more, though NATS reaches it
    "deaf",  # the other way round
    "cut",  # both
    "probe_cut",  # a controld's probes do not reach a node, nor the other way round
    "etcd_cut",  # a controld and etcd do not reach each other
    "etcd",  # etcd has no leader
    "leader",  # a stream has no leader
    "nats",  # the message server restarts
    "slow_disk",  # appends take long
    "lost_acks",  # a share of appends is not acknowledged
    "lossy",  # a share of core messages is lost
    "slow",  # all messages of a process take long
    "clock",  # a process's wall clock steps
]


BUSY_NODE = "@node"
"""As a target: the node that runs most at that moment."""
BUSY_CONTROLD = "@controld"
"""As a target: the controld that decided last."""


class Fault(msgspec.Struct, frozen=True):
    """`at` and `lasts` in seconds from the start; `much` is what the kind says."""

    at: float
    kind: FaultKind
    target: str = ""
    lasts: float = 0.0
    much: float = 0.0


class Work(msgspec.Struct, frozen=True):
    """One submission that a client repeats until it is accepted."""

    at: float
    request_id: str
    pool: str
    session: str
    steps: int
    step_s: float
    fails: bool = False
    keeps_state: bool = False
    """The task leaves its session as it was."""
    deadline_s: float = 0.0
    cancel_after_s: float = 0.0
    """0: it is not cancelled."""
    twice: bool = False
    """Another client submits the same with the same request id."""


class Sizes(msgspec.Struct, frozen=True):
    """How large the cluster is."""

    controlds: int = 3
    racks: int = 3
    nodes_a_rack: int = 2
    shards: int = 8
    streams: int = 2
    slots: int = 4
    lease_ttl_s: float = 2.0


class Plan(msgspec.Struct, frozen=True):
    """One run. Faults start within `faults_s`, and all has healed some seconds later."""

    seed: int
    sizes: Sizes
    work: tuple[Work, ...]
    faults: tuple[Fault, ...]
    faults_s: float


SMALL = Sizes()
LARGE = Sizes(controlds=5, racks=4, nodes_a_rack=4, shards=16, streams=4)

POOLS = ("chat", "code", "night")
FAULTS_S = 15.0
FIRST_FAULT_S = 4.0
"""By then the cluster stands."""
MOST_LASTS_S = 8.0


def draw_plan(seed: int) -> Plan:
    """Return the plan of a seed."""
    rng = random.Random(f"plan {seed}")
    sizes = LARGE if seed % 25 == 24 else SMALL
    return Plan(
        seed=seed,
        sizes=sizes,
        work=_work(rng, 42 if sizes is SMALL else 90),
        faults=_faults(rng, sizes),
        faults_s=FAULTS_S,
    )


def controlds_of(sizes: Sizes) -> list[str]:
    return [f"c{number}" for number in range(sizes.controlds)]


def nodes_of(sizes: Sizes) -> list[str]:
    return [
        f"n{rack}-{number}" for rack in range(sizes.racks) for number in range(sizes.nodes_a_rack)
    ]


def rack_of(node: str) -> str:
    return f"r{node[1:].partition('-')[0]}"


def _work(rng: random.Random, count: int) -> tuple[Work, ...]:
    made = []
    for number in range(count):
        pool = rng.choice(POOLS)
        ends = rng.random()
        made.append(
            Work(
                at=round(drawn(rng, 1.0, FAULTS_S), 3),
                request_id=f"req-{number}",
                pool=pool,
                session=f"s{rng.randrange(4)}",
                steps=rng.randrange(1, 8),
                step_s=round(rng.choice((0.02, 0.2, 0.5, 0.8, 1.2)), 3),
                fails=0.30 < ends < 0.35,
                keeps_state=0.35 < ends < 0.50,
                deadline_s=round(drawn(rng, 0.5, 6.0), 3) if ends < 0.08 else 0.0,
                cancel_after_s=round(drawn(rng, 0.0, 3.0), 3) if 0.10 < ends < 0.22 else 0.0,
                twice=rng.random() < 0.2,
            )
        )
    return tuple(sorted(made, key=lambda work: (work.at, work.request_id)))


def _faults(rng: random.Random, sizes: Sizes) -> tuple[Fault, ...]:
    """Draw bursts of faults: what goes wrong at one time is worse than one after another."""
    controlds, nodes = controlds_of(sizes), nodes_of(sizes)
    made = []
    for _ in range(rng.randrange(2, 6)):
        at = drawn(rng, FIRST_FAULT_S, FAULTS_S)
        for _ in range(rng.choice((1, 1, 2, 3, 4))):
            when = round(min(FAULTS_S, at + drawn(rng, 0.0, 1.5)), 3)
            made.append(_fault(rng, when, controlds, nodes, sizes))
    return tuple(sorted(made, key=lambda fault: (fault.at, fault.kind, fault.target)))


def _fault(
    rng: random.Random, at: float, controlds: list[str], nodes: list[str], sizes: Sizes
) -> Fault:
    kind = rng.choice(_KINDS)
    lasts = round(rng.choice((0.3, 1.0, 3.0, MOST_LASTS_S)) * drawn(rng, 0.7, 1.0), 3)
    controld, node = rng.choice(controlds), rng.choice(nodes)
    struck = BUSY_CONTROLD if rng.random() < 0.5 else controld
    hit = BUSY_NODE if rng.random() < 0.5 else node
    anyone = struck if rng.random() < 0.5 else hit
    match kind:
        case "crash" | "restart" | "freeze" | "mute" | "deaf" | "cut" | "slow":
            return Fault(at, kind, anyone, lasts, 0.2)
        case "machine" | "machine_freeze" | "worker":
            return Fault(at, kind, hit, lasts)
        case "clock":
            return Fault(at, kind, anyone, 0.0, round(rng.choice((-1, 1)) * drawn(rng, 0.1, 20), 3))
        case "rack":
            return Fault(at, kind, rack_of(node), lasts)
        case "probe_cut":
            return Fault(at, kind, f"{controld} {node}", lasts)
        case "etcd_cut":
            return Fault(at, kind, struck, lasts, float(rng.randrange(3)))
        case "leader":
            return Fault(at, kind, str(rng.randrange(sizes.streams)), 7.0)
        case "slow_disk":
            return Fault(at, kind, "", lasts, round(drawn(rng, 0.02, 0.3), 3))
        case "lost_acks" | "lossy":
            return Fault(at, kind, "", lasts, round(drawn(rng, 0.05, 0.5), 3))
    return Fault(at, kind, "", lasts)


_KINDS: tuple[FaultKind, ...] = (
    *("crash", "crash", "freeze", "freeze", "machine", "machine", "leader", "leader"),
    *("restart", "machine_freeze", "worker", "rack", "mute", "deaf", "cut", "probe_cut"),
    *("etcd_cut", "etcd", "nats", "slow_disk", "lost_acks", "lossy", "slow", "clock"),
)
