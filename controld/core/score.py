"""What it costs to put one more task on a slot. Lower is better; idle costs 0."""

from __future__ import annotations

from controld.core.eligibility import Node, Slot
from corefleet.messages.wire import LoadVector

_MIXED = (0.8, 0.7, 0.4, 0.3, 0.3)
_WEIGHTS: dict[str, tuple[float, float, float, float, float]] = {
    "compute": (1.0, 1.0, 0.3, 0.1, 0.1),
    "retrieval": (0.5, 0.6, 0.5, 0.6, 1.0),
    "tool": (0.8, 0.3, 0.3, 0.8, 0.4),
    "mixed": _MIXED,
}
"""By kind: CPU, memory bandwidth, memory, network, storage."""

_BATCH_FACTOR = 1.5
"""Batch leaves a loaded node to the online class sooner."""

_FULL = 0.999


def barrier(utilisation: float) -> float:
    """Return u / (1 - u): about u when idle, without bound towards 1."""
    if utilisation >= _FULL:
        utilisation = _FULL
    return utilisation / (1.0 - utilisation)


def load_cost(load: LoadVector, pool_class: str, kind: str) -> float:
    """Return the weighted barriers of a node's resources."""
    cpu, bandwidth, memory, network, storage = _WEIGHTS.get(kind, _MIXED)
    cost = (
        cpu * barrier(load.cpu)
        + bandwidth * barrier(load.memory_bandwidth)
        + memory * barrier(load.memory)
        + network * barrier(load.network)
        + storage * barrier(load.storage)
    )
    return cost * _BATCH_FACTOR if pool_class == "batch" else cost


def node_cost(node: Node, pool_class: str, kind: str) -> float:
    """Return `load_cost` of the node's smoothed load, computed once per change."""
    key = (pool_class, kind)
    cost = node.costs.get(key)
    if cost is None:
        cost = node.costs[key] = load_cost(node.load, pool_class, kind)
    return cost


def slot_cost(slot: Slot, pool_class: str, kind: str) -> float:
    """Return what one more task costs on `slot`: its node's load, places and queue."""
    total = slot.total
    return (
        node_cost(slot.node, pool_class, kind)
        + barrier(slot.taken / total)
        + slot.node.queued / total
    )
