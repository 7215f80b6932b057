"""The fleet's figures as arrays: one row a node, one row a slot.

Arrays are for what looks at many rows at once (digests, pools that change, full scans).
What a decision reads of a row lies in one cache line: decisions come to nodes at random, and
what they wait for is memory. Each array has a memoryview of the same memory, named
`<array>_v`: one element costs a third of what indexing the array costs, and a decision reads
a few dozen. Whoever keeps either beyond a call must fetch it again: growing replaces all.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Rows = NDArray[np.intp]

KINDS = ("compute", "retrieval", "tool", "mixed")
"""Task kinds, in the order of the rows of `NodeColumns.costs`."""

RESOURCES = ("cpu", "memory_bandwidth", "memory", "network", "storage")
"""The load figures that cost something, first in `NodeColumns.loads`."""

FIGURES = (*RESOURCES, "llc_hit", "remote", "steal")

_FIRST_ROWS = 64
_NOWHERE = -1
_LINE_BYTES = 64

_NODE = np.dtype(
    [
        ("worst", np.float64),
        ("crowd", np.float64),
        ("costs", np.float64, (len(KINDS),)),
        ("queued", np.int32),
        ("taken", np.int32),
        ("places", np.int32),
        ("rack", np.int32),
    ]
)
_SLOT = np.dtype(
    [
        ("cost", np.float64),
        ("node", np.int32),
        ("pool", np.int32),
        ("total", np.int32),
        ("used", np.int32),
        ("own", np.int32),
        ("pending", np.int32),
        ("taken", np.int32),
        ("position", np.int32),
        ("fits", np.bool_),
        ("cooling", np.bool_),
        ("held", np.bool_),
        ("shared", np.bool_),
        ("eligible", np.bool_),
        ("", f"V{_LINE_BYTES - 45}"),
    ]
)


class _Columns:
    """Rows that are taken and freed; arrays double when they are full."""

    def __init__(self) -> None:
        self.size = 0
        """Rows from here on were never taken."""
        self._free: list[int] = []
        self._capacity = 0

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self.size == self._capacity:
            self._capacity = max(_FIRST_ROWS, 2 * self._capacity)
            self._allocate(self._capacity)
        self.size += 1
        return self.size - 1

    def _allocate(self, rows: int) -> None:
        raise NotImplementedError


class NodeColumns(_Columns):
    """What is known of each node."""

    loads: Floats
    """(rows, FIGURES), smoothed."""
    worst: Floats
    """Highest utilisation of any resource."""
    costs: Floats
    """(KINDS, rows): what the load costs a task of the online class."""
    crowd: Floats
    """What the taken places of all pools cost."""
    beat_age_s: Floats
    queued: Ints
    running: Ints
    taken: Ints
    """Places in use, over all pools."""
    places: Ints
    """Places offered, over all pools."""
    rack: Ints
    ready: Bools
    """May be given new tasks, as far as the node goes."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        """Counts digests: what was read at an older one is no longer quite true."""
        self._table = np.zeros(0, _NODE)
        self._allocate(0)

    def take(self, rack: int) -> int:
        """Return a row for a node of `rack`, all figures at rest."""
        row = self._new_row()
        self.loads[row] = 0.0
        self.costs[:, row] = 0.0
        for floats in (self.worst, self.crowd, self.beat_age_s):
            floats[row] = 0.0
        for ints in (self.queued, self.running, self.taken, self.places):
            ints[row] = 0
        self.rack[row] = rack
        self.ready[row] = False
        return row

    def free(self, row: int) -> None:
        self.ready[row] = False
        self._free.append(row)

    def _allocate(self, rows: int) -> None:
        self.loads = _grown(self, "loads", (rows, len(FIGURES)), np.float64)
        self.beat_age_s = _grown(self, "beat_age_s", (rows,), np.float64)
        self.running = _grown(self, "running", (rows,), np.int32)
        self.ready = _grown(self, "ready", (rows,), np.bool_)
        table = self._table = _lines(rows, self._table)
        self.worst, self.crowd, self.costs = table["worst"], table["crowd"], table["costs"].T
        self.queued, self.taken = table["queued"], table["taken"]
        self.places, self.rack = table["places"], table["rack"]
        self.cost_v = [_floats(row) for row in self.costs]
        self.worst_v = _floats(self.worst)
        self.crowd_v = _floats(self.crowd)
        self.queued_v = ints(self.queued)
        self.taken_v = ints(self.taken)
        self.places_v = ints(self.places)
        self.rack_v = ints(self.rack)
        self.ready_v = _bools(self.ready)


class SlotColumns(_Columns):
    """What is known of each slot: the places of one pool in one domain of one node."""

    node: Ints
    """Row of the node."""
    pool: Ints
    """Number of the pool, -1 where no slot is."""
    total: Ints
    used: Ints
    """Places in use, as the newest beat says."""
    own: Ints
    """Attempts that this controld's shards have here."""
    pending: Ints
    """Own changes that the newest beat cannot show."""
    taken: Ints
    """Places in use: the beat's figure corrected by what we did since."""
    cost: Floats
    """What the taken places and the node's queue cost."""
    fits: Bools
    """The pool can run here at all."""
    cooling: Bools
    held: Bools
    """Other pools of the node have what a task needs: the node itself or an accelerator."""
    shared: Bools
    """`held` may change with what is taken."""
    eligible: Bools
    position: Ints
    """Index in the pool's list of open slots, -1 when it is not open."""

    def __init__(self) -> None:
        super().__init__()
        self._table = np.zeros(0, _SLOT)
        self._allocate(0)

    def take(self, node: int, pool: int) -> int:
        """Return a row for a slot without places."""
        row = self._new_row()
        for ints in (self.total, self.used, self.own, self.pending, self.taken):
            ints[row] = 0
        for bools in (self.fits, self.cooling, self.held, self.shared, self.eligible):
            bools[row] = False
        self.cost[row] = 0.0
        self.node[row] = node
        self.pool[row] = pool
        self.position[row] = _NOWHERE
        return row

    def free(self, row: int) -> None:
        self.pool[row] = _NOWHERE
        self.own[row] = 0
        self._free.append(row)

    def of_pool(self, pool: int) -> Rows:
        """Return the rows of a pool's slots."""
        return np.flatnonzero(self.pool[: self.size] == pool)

    def _allocate(self, rows: int) -> None:
        table = self._table = _lines(rows, self._table)
        self.node, self.pool = table["node"], table["pool"]
        self.total, self.used = table["total"], table["used"]
        self.own, self.pending, self.taken = table["own"], table["pending"], table["taken"]
        self.cost, self.position = table["cost"], table["position"]
        self.fits, self.cooling, self.held = table["fits"], table["cooling"], table["held"]
        self.shared, self.eligible = table["shared"], table["eligible"]
        self.node_v = ints(self.node)
        self.pool_v = ints(self.pool)
        self.total_v = ints(self.total)
        self.used_v = ints(self.used)
        self.own_v = ints(self.own)
        self.pending_v = ints(self.pending)
        self.taken_v = ints(self.taken)
        self.cost_v = _floats(self.cost)
        self.fits_v = _bools(self.fits)
        self.cooling_v = _bools(self.cooling)
        self.held_v = _bools(self.held)
        self.shared_v = _bools(self.shared)
        self.eligible_v = _bools(self.eligible)
        self.position_v = ints(self.position)


def _grown(columns: _Columns, name: str, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
    """Return a larger array with the rows of the one that `columns` has under `name`."""
    new = np.zeros(shape, kind)
    old = getattr(columns, name, None)
    if old is not None:
        new[: len(old)] = old
    return new


def _lines(rows: int, old: NDArray[Any]) -> NDArray[Any]:
    """Return a larger table with the rows of `old`, each of its rows in one cache line."""
    memory = np.zeros((rows + 1) * _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    table = memory[start : start + rows * _LINE_BYTES].view(old.dtype)
    table[: len(old)] = old
    return table


def _floats(array: Floats) -> memoryview[float]:
    return cast("memoryview[float]", array.data)


def ints(array: Ints) -> memoryview[int]:
    """Return a view of the array's memory."""
    return array.data


def _bools(array: Bools) -> memoryview[bool]:
    return cast("memoryview[bool]", array.data)
