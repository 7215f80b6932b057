"""Which nodes are drained: those that somebody wants free, and those that ask for it. Pure.

Every controld decides this for itself, from the same records of the store, so that all
come to the same nodes without a word between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from corefleet.messages.records import Drain, LostNode, NodeRegistration

_EXACT = 1e-9
"""A share of a count is not a hair less than the whole number that it is meant to be."""


@dataclass(frozen=True, slots=True)
class NodeDrain:
    """One node that is being drained; nobody's tasks are placed there."""

    node: str
    reason: str
    by: str = ""
    """Who wants it; '' when the node itself asks."""
    since_ms: int = 0
    deadline_ms: int = 0
    """Wall-clock milliseconds after which attempts are moved between steps or not; 0: never."""

    @property
    def planned(self) -> bool:
        """Whether somebody wants it, rather than the node's health."""
        return bool(self.by)


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """What follows from the records. Both are by node."""

    standing: Mapping[str, NodeDrain]
    """Attempts there are asked to yield."""
    waiting: Mapping[str, NodeDrain]
    """Nodes that ask, and must wait: they are given nothing new, and go on with what they have."""


def plan_drains(
    drains: Mapping[str, Drain],
    nodes: Mapping[str, NodeRegistration],
    lost: Mapping[str, LostNode],
    max_share: float,
) -> DrainPlan:
    """Decide from the records of all drains, nodes and lost nodes.

    Who wants a node free gets it, however many are. Of the nodes whose health asks, at
    most `max_share` of those that live are drained at a time, one at least (none for a
    share of 0), in the order in which they began to ask: a cause that many share must
    not empty the cluster. A node found lost has nothing to move and takes nobody's turn.
    """
    standing = {name: _wanted(drain) for name, drain in drains.items()}
    living = [
        node for name, node in nodes.items() if name not in lost or lost[name].epoch < node.epoch
    ]
    asking = [node for node in living if node.draining and node.node not in standing]
    asking.sort(key=lambda node: (node.draining_since_ms, node.node))
    turns = max(1, int(max_share * len(living) + _EXACT)) if max_share > 0 else 0
    standing.update((node.node, _asked(node)) for node in asking[:turns])
    return DrainPlan(standing, {node.node: _asked(node) for node in asking[turns:]})


def _wanted(drain: Drain) -> NodeDrain:
    by = drain.by or "an operator"
    return NodeDrain(
        node=drain.node,
        reason=drain.reason or f"{by} wants it free",
        by=by,
        since_ms=drain.at_ms,
        deadline_ms=drain.deadline_ms,
    )


def _asked(node: NodeRegistration) -> NodeDrain:
    return NodeDrain(
        node=node.node,
        reason=node.draining_reason or "its health gets worse",
        since_ms=node.draining_since_ms,
    )
