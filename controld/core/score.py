"""What it costs to put one more task on a slot. Lower is better; idle costs 0.

A slot's cost is the sum of three parts, each kept up to date where it changes:

- the weighted barriers of its node's resources, by task kind (`NodeColumns.costs`);
- the barrier of the node's places in use, over all pools (`NodeColumns.crowd`);
- the barrier of the slot's own places in use and the node's queue a place (`SlotColumns.cost`).

The last two contain our own placements from the moment they are made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from controld.core.columns import KINDS, RESOURCES, Floats, NodeColumns, Rows, SlotColumns
from corefleet.messages.wire import LoadVector

Figures = NDArray[Any]
"""Floats or integers."""

HOME_LIMIT = 0.9
"""A node with a resource above this utilisation is over its limit."""

_WEIGHTS: dict[str, tuple[float, float, float, float, float]] = {
    "compute": (1.0, 1.0, 0.3, 0.1, 0.1),
    "retrieval": (0.5, 0.6, 0.5, 0.6, 1.0),
    "tool": (0.8, 0.3, 0.3, 0.8, 0.4),
    "mixed": (0.8, 0.7, 0.4, 0.3, 0.3),
}
"""By kind: CPU, memory bandwidth, memory, network, storage."""

_CROWD_WEIGHT = 0.5

_BATCH_FACTOR = 1.5
"""Batch leaves a loaded node to the online class sooner."""

_FULL = 0.999
_MOST = _FULL / (1.0 - _FULL)

_MIXED = KINDS.index("mixed")
_ROW_OF_KIND = {kind: row for row, kind in enumerate(KINDS)}
_WEIGHT_TABLE: Floats = np.array([_WEIGHTS[kind] for kind in KINDS])


def barrier(utilisation: float) -> float:
    """Return u / (1 - u): about u when idle, without bound towards 1."""
    if utilisation < _FULL:
        return utilisation / (1.0 - utilisation)
    return _MOST


def barriers(utilisation: Floats) -> Floats:
    """Return `barrier` of each element."""
    bounded = np.minimum(utilisation, _FULL)
    return bounded / (1.0 - bounded)


def kind_row(kind: str) -> int:
    """Return the row of `NodeColumns.costs` for a task kind; unknown ones are mixed."""
    return _ROW_OF_KIND.get(kind, _MIXED)


def class_factor(pool_class: str) -> float:
    """Return what a class multiplies a node's costs by."""
    return _BATCH_FACTOR if pool_class == "batch" else 1.0


def load_costs(loads: Floats) -> Floats:
    """Return (KINDS, nodes): the weighted barriers of (nodes, FIGURES) loads."""
    return _WEIGHT_TABLE @ barriers(loads[:, : len(RESOURCES)]).T


def load_cost(load: LoadVector, pool_class: str, kind: str) -> float:
    """Return the weighted barriers of one node's resources."""
    figures = np.array([[getattr(load, name) for name in RESOURCES]])
    return float(load_costs(figures)[kind_row(kind), 0]) * class_factor(pool_class)


def crowd_cost(taken: int, places: int) -> float:
    """Return what a node's taken places cost."""
    return _CROWD_WEIGHT * barrier(taken / places) if places else 0.0


def crowd_costs(taken: Figures, places: Figures) -> Floats:
    """Return `crowd_cost` of each node."""
    return np.where(places > 0, _CROWD_WEIGHT * barriers(taken / np.maximum(places, 1.0)), 0.0)


def place_cost(taken: int, total: int, queued: int) -> float:
    """Return what a slot's taken places and its node's queue cost; 0 without places."""
    return barrier(taken / total) + queued / total if total else 0.0


def place_costs(taken: Figures, total: Figures, queued: Figures) -> Floats:
    """Return `place_cost` of each slot."""
    divisor = np.maximum(total, 1.0)
    return np.where(total > 0, barriers(taken / divisor) + queued / divisor, 0.0)


def node_cost(nodes: NodeColumns, node: int, kind: int, factor: float) -> float:
    """Return the part of `slot_cost` that all slots of a node share."""
    cost: float = (nodes.cost_v[kind][node] + nodes.crowd_v[node]) * factor
    return cost


def slot_cost(nodes: NodeColumns, slots: SlotColumns, row: int, kind: int, factor: float) -> float:
    """Return what one more task costs on the slot of `row`."""
    node = slots.node_v[row]
    cost: float = (nodes.cost_v[kind][node] + nodes.crowd_v[node]) * factor + slots.cost_v[row]
    return cost


def slot_costs(
    nodes: NodeColumns, slots: SlotColumns, rows: Rows, kind: int, factor: float
) -> Floats:
    """Return `slot_cost` of each of `rows`."""
    node = slots.node[rows]
    costs: Floats = (nodes.costs[kind][node] + nodes.crowd[node]) * factor + slots.cost[rows]
    return costs
