"""Speed and quality of placement: decisions over 4096 nodes, and replays against an oracle.

Speed: one controld's fleet of 4096 nodes of two domains, half used by others; sessions come
in random order and each decision is placed and counted, as a shard does it. Ends, digests
and the making of requests are outside the clock; digests are timed on their own. The
machine may be shared, so throughput is by CPU time; latencies are given by both clocks.

Quality: see place_oracle; arrivals are made as arrivals.py says.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from random import Random

import numpy as np

from controld.core.draws import MOST_AHEAD
from controld.core.eligibility import Offers, Slot
from controld.core.fleet import Fleet
from controld.core.placement import PlacementRequest, place
from controld.core.score import class_factor, kind_row, slot_cost, slot_costs
from corefleet.codec import decode, encode
from corefleet.event_loop import calm_collector
from corefleet.messages.records import DomainInfo, NodeRegistration, PoolSpec
from corefleet.messages.wire import LoadVector, NodeView, RackDigest, SlotUse
from tools.bench.arrivals import PATTERNS
from tools.bench.machine import Measured, percentile, progress
from tools.bench.place_oracle import NODES_A_RACK, Oracle, Owners, Plant, Quality, replay

NODES = 4096
SESSIONS = 200_000
GOAL_PER_S = 50_000
GOAL_P99_US = 200
OWNERS = 20

_POOLS = ("chat", "code", "crunch")
_DOMAINS = 2
_PLACES = 32
_IN_FLIGHT = 20_000
_BLOCK = 500
"""Decisions between two digests: 50,000 a second meet 100 racks' digests 4 times a second at
a rate of 125; a fifth of the racks' is taken in after each block."""

_TASK_S = 3.0
_UTILISATION = 0.7
_CROWDED = 0.95
"""Of all places, where tasks must wait for one."""

_REPLAYS = {
    **{name: (name, _UTILISATION) for name in PATTERNS},
    "poisson_crowded": ("poisson", _CROWDED),
    "azure_code_crowded": ("azure_code", _CROWDED),
}


def run(*, quick: bool, peer: str) -> Measured:
    """Measure."""
    if peer:
        raise SystemExit(f"place: peer {peer!r} is not known; there is none")
    measured = Measured({"goal_decisions_per_s": GOAL_PER_S, "goal_p99_us": GOAL_P99_US})
    measured.results.update(_speed(blocks=40 if quick else 200))
    progress(f"speed: {measured.results}")
    quality = {}
    for name, (pattern, load) in _REPLAYS.items():
        real, oracle = compare(
            pattern,
            nodes=80 if quick else 160,
            owners=OWNERS,
            seconds=4.0 if quick else 12.0,
            load=load,
        )
        quality[name] = {"ours": asdict(real), "oracle": asdict(oracle)}
        progress(f"{name}: {quality[name]}")
        if name == "poisson":
            measured.results["load_cv"] = round(real.load_cv, 4)
            measured.results["oracle_load_cv"] = round(oracle.load_cv, 4)
            measured.results["affinity_hit_rate"] = round(real.affinity_hit_rate, 4)
            measured.results["oracle_affinity_hit_rate"] = round(oracle.affinity_hit_rate, 4)
    measured.results["quality_owners"] = OWNERS
    measured.results["quality"] = quality
    return measured


def compare(
    pattern: str,
    *,
    nodes: int,
    owners: int,
    seconds: float,
    seed: int = 7,
    uneven: bool = False,
    load: float = _UTILISATION,
) -> tuple[Quality, Quality]:
    """Replay a pattern through the real placement and through the oracle.

    The load on a node is the reference plan's: 15 tasks a second, 64 places, each for
    3 s; with another `load` (share of all places) tasks come at another rate. `uneven`: two
    of three nodes have half the places, the others twice as many.
    """
    sizes = [(32 if node % 3 else 128) if uneven else 64 for node in range(nodes)]
    pools = ("chat", "crunch") if pattern == "huge_pool" else ("chat",)
    rate = load * sum(sizes) / _TASK_S
    arrivals = PATTERNS[pattern](rate, seconds, _TASK_S, 50 * nodes, seed)
    real = replay(
        arrivals, Plant(sizes, pools), lambda plant, started: Owners(plant, owners, started)
    )
    return real, replay(arrivals, Plant(sizes, pools), Oracle)


# Speed.


def _speed(blocks: int) -> dict[str, object]:
    fleet, digests = Fleet(), _Digests()
    register_s = time.process_time()
    for registration in _registrations():
        fleet.registered(registration, 0.0)
    register_s = time.process_time() - register_s
    fleet.set_pools({pool: PoolSpec(name=pool) for pool in _POOLS})
    for _ in range(2):
        digests.feed(fleet, 0.0, digests.racks)
    digests.clear()
    calm_collector()  # As controld does once it is up.
    random = Random(5)
    homes = [int(random.random() * NODES) for _ in range(SESSIONS)]
    running: deque[Slot] = deque()
    cpu_s, hits, count = 0.0, 0, 0
    wall_us: list[float] = []
    cpu_us: list[float] = []
    for block in range(blocks):
        now = 1.0 + block * 0.05
        asked = [int(random.random() * SESSIONS) for _ in range(_BLOCK)]
        requests = [
            PlacementRequest("chat", home_node=f"n{homes[session]}", home_domain=session % 2)
            for session in asked
        ]
        # One half is timed as a whole, the other decision by decision: the clock costs, too.
        half = _BLOCK // 2
        gc.collect(0)
        started = time.process_time()
        chosen = _decide(fleet, requests[:half], now, random)
        cpu_s += time.process_time() - started
        count += half
        for request in requests[half:]:
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            chosen += _decide(fleet, [request], now, random)
            cpu_us.append((time.thread_time_ns() - cpu) / 1000)
            wall_us.append((time.perf_counter_ns() - wall) / 1000)
        for session, slot in zip(asked, chosen, strict=True):
            node = int(slot.node.name[1:])
            hits += homes[session] == node
            homes[session] = node
        running += chosen
        while len(running) > _IN_FLIGHT:
            fleet.gave_back(running.popleft(), now)
        digests.feed(fleet, now, digests.racks // 5)
    return {
        "nodes": NODES,
        "sessions": SESSIONS,
        "decisions_per_s": round(count / cpu_s),
        "p50_us": round(percentile(wall_us, 0.5), 1),
        "p99_us": round(percentile(wall_us, 0.99), 1),
        "p999_us": round(percentile(wall_us, 0.999), 1),
        "cpu_p50_us": round(percentile(cpu_us, 0.5), 1),
        "cpu_p99_us": round(percentile(cpu_us, 0.99), 1),
        "batch": 1,
        "samples_drawn_ahead": MOST_AHEAD,
        "speed_affinity_hit_rate": round(hits / (blocks * _BLOCK), 3),
        **_scans(fleet),
        "register_us_per_node": round(register_s / NODES * 1e6, 1),
        **digests.figures(),
    }


def _decide(
    fleet: Fleet, requests: list[PlacementRequest], now: float, random: Random
) -> list[Slot]:
    """Place and count each request, as a shard does it."""
    chosen = []
    for request in requests:
        slot = place(fleet, request, random).slot
        if slot is None:
            raise SystemExit("place: the fleet is full; expected free places throughout")
        fleet.took(slot, now)
        chosen.append(slot)
    return chosen


def _scans(fleet: Fleet) -> dict[str, object]:
    """Return how many decisions a second scans of all open slots make."""
    offers = fleet.offers("chat")
    if offers is None:
        raise SystemExit("place: no node offers the pool")
    return {
        "full_scan_decisions_per_s": round(1 / _scan_s(offers, 200, _array_scan)),
        "plain_full_scan_decisions_per_s": round(1 / _scan_s(offers, 5, _plain_scan), 1),
    }


def _scan_s(offers: Offers, times: int, scan: Callable[[Offers], int]) -> float:
    """Return the CPU seconds of the least of all open slots' costs, by `scan`."""
    taken = []
    for _ in range(times):
        started = time.process_time()
        scan(offers)
        taken.append(time.process_time() - started)
    return max(statistics.median(taken), 1e-9)


def _array_scan(offers: Offers) -> int:
    nodes, slots, rows = offers.node_columns, offers.slot_columns, offers.open_rows()
    costs = slot_costs(nodes, slots, rows, kind_row("mixed"), class_factor("online"))
    return int(rows[np.argmin(costs)])


def _plain_scan(offers: Offers) -> int:
    nodes, slots = offers.node_columns, offers.slot_columns
    kind, factor = kind_row("mixed"), class_factor("online")
    rows = offers.open_rows().tolist()
    return int(min(rows, key=lambda row: slot_cost(nodes, slots, row, kind, factor)))


def _registrations() -> list[NodeRegistration]:
    slots = dict.fromkeys(_POOLS, _PLACES)
    domains = tuple(DomainInfo(domain=d, cpus="0", slots=slots) for d in range(_DOMAINS))
    return [
        NodeRegistration(node=f"n{node}", epoch=1, rack=f"r{node // NODES_A_RACK}", domains=domains)
        for node in range(NODES)
    ]


class _Digests:
    """Makes digests, feeds them, and keeps what they cost."""

    def __init__(self) -> None:
        self.racks = -(-NODES // NODES_A_RACK)
        self._random = Random(1)
        self._next = 0
        self._number = 0
        self._decode_ms: list[float] = []
        self._intake_ms: list[float] = []

    def feed(self, fleet: Fleet, now: float, count: int) -> None:
        """Let the next `count` racks send theirs."""
        for _ in range(count):
            payload = encode(self._make(self._next % self.racks))
            self._next += 1
            started = time.process_time()
            digest = decode(payload, RackDigest)
            decoded = time.process_time()
            fleet.digest(digest, now)
            self._intake_ms.append((time.process_time() - decoded) * 1000)
            self._decode_ms.append((decoded - started) * 1000)

    def clear(self) -> None:
        """Forget what was measured so far."""
        self._decode_ms.clear()
        self._intake_ms.clear()

    def figures(self) -> dict[str, object]:
        return {
            "digest_decode_cpu_ms": round(statistics.median(self._decode_ms), 3),
            "digest_intake_cpu_ms": round(statistics.median(self._intake_ms), 3),
            "digest_slots": NODES_A_RACK * _DOMAINS * len(_POOLS),
        }

    def _make(self, rack: int) -> RackDigest:
        self._number += 1
        first = rack * NODES_A_RACK
        nodes = range(first, min(first + NODES_A_RACK, NODES))
        views = tuple(self._view(node) for node in nodes)
        return RackDigest(rack=f"r{rack}", controld="c0", epoch=1, number=self._number, nodes=views)

    def _view(self, node: int) -> NodeView:
        random = self._random.random
        load = LoadVector(
            cpu=0.3 + 0.3 * random(),
            memory_bandwidth=0.2 + 0.3 * random(),
            memory=0.4 + 0.1 * random(),
            network=0.2 * random(),
            storage=0.2 * random(),
        )
        slots = tuple(
            SlotUse(pool, domain, _PLACES, _PLACES // 2 - 4 + int(8 * random()))
            for pool in _POOLS
            for domain in range(_DOMAINS)
        )
        running = sum(use.used for use in slots)
        return NodeView(
            node=f"n{node}", epoch=1, load=load, running=running, slots=slots, beat_age_s=0.1
        )
