"""Digests into arrays: a rack's nodes at once, with the rows looked up once a layout.

A rack's digests name the same nodes, pools and domains for hours. What is looked up for
them (the plan) is kept until one of them changes; a digest then costs a handful of array
operations, whatever the number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np

from controld.core.columns import FIGURES, RESOURCES, Floats, Ints, Rows
from controld.core.eligibility import Node, Slot
from controld.core.places import Group, Places
from controld.core.score import load_costs
from corefleet.messages.wire import LoadVector, NodeView, RackDigest

_SMOOTHING = 0.5
"""Share of a new load in the smoothed one."""

_TAKE_LAG_S = 0.05
"""A placement younger than this at a beat's receipt may be missing from the beat."""

_SURPRISE_MEMORY = 0.02
"""Weight of one digest in the mean of surprises: some 50 digests are remembered."""

_IDENTITY: Callable[[NodeView], tuple[str, int, str]] = attrgetter("node", "epoch", "state")
_LOAD: Callable[[LoadVector], tuple[float, ...]] = attrgetter(*FIGURES)


Views = Sequence[NodeView]


class _Plan:
    """Where the figures of a rack's digest go."""

    def __init__(
        self, version: int, identity: list[tuple[str, int, str]], nodes: list[Node], kept: list[int]
    ) -> None:
        self.version = version
        self.identity = identity
        self.nodes = nodes
        self.node_rows: Rows = np.array([node.row for node in nodes], np.intp)
        self.kept = kept
        """Indices of the views of `nodes`."""
        self.whole = len(kept) == len(identity)
        self.layout: _Layout | None = None
        self.totals: list[int] = []
        self.group: Group | None = None
        self.named: Rows = np.zeros(0, np.intp)
        """Rows of the slots that the views name, in their order."""
        self.per_pool: Floats = np.zeros(0)
        """How many of them each pool has, by its number."""


@dataclass(slots=True)
class _Layout:
    """Which slots the views of a digest name."""

    lengths: list[int]
    pools: list[str]
    domains: list[int]


class RackNews:
    """Takes digests in. `entered` is told of nodes whose view has another state than ours."""

    def __init__(
        self,
        places: Places,
        node_of: Callable[[str], Node | None],
        entered: Callable[[Node, NodeView], None],
    ) -> None:
        self._places = places
        self._node_of = node_of
        self._entered = entered
        self._plans: dict[str, _Plan] = {}
        self._version = 0

    def forget(self) -> None:
        """Nodes came, went or changed their state: look everything up again."""
        self._version += 1

    def take(self, digest: RackDigest, now: float) -> None:
        """Take in what a digest says of nodes that live at the epoch that it names."""
        views: Views = digest.nodes
        identity = list(map(_IDENTITY, views))
        plan = self._plans.get(digest.rack)
        if plan is None or plan.version != self._version or plan.identity != identity:
            plan = self._plans[digest.rack] = self._planned(identity, views)
        if not plan.nodes:
            return
        if not plan.whole:
            views = [views[at] for at in plan.kept]
        uses = list(chain.from_iterable([view.slots for view in views]))
        layout = _Layout(
            [len(view.slots) for view in views],
            [use.pool for use in uses],
            [use.domain for use in uses],
        )
        totals = [use.total for use in uses]
        same = layout == plan.layout and totals == plan.totals
        if not same:
            self._lay_out(plan, views, layout, totals)
        self._take_nodes(plan, views)
        slots, named = self._places.slots, plan.named
        before = slots.used[named] + slots.pending[named]
        for node, view in zip(plan.nodes, views, strict=True):
            if node.takes or node.gives:
                _settle(node, now - view.beat_age_s)
        used = np.array([use.used for use in uses], np.int32)
        slots.used[named] = used
        if same and uses:
            self._be_surprised(plan, used + slots.pending[named] - before)
        if plan.group is not None:
            self._places.recount_all(plan.group)

    # Inside.

    def _planned(self, identity: list[tuple[str, int, str]], views: Views) -> _Plan:
        """Carry out changes of state, and find the nodes whose figures count."""
        kept = []
        nodes = []
        for at, view in enumerate(views):
            node = self._node_of(view.node)
            if node is None or view.epoch != node.epoch:
                continue
            self._entered(node, view)
            if node.epoch > node.gone_epoch:
                kept.append(at)
                nodes.append(node)
        return _Plan(self._version, identity, nodes, kept)

    def _lay_out(self, plan: _Plan, views: Views, layout: _Layout, totals: list[int]) -> None:
        """Find the rows of the slots; those that a node no longer names have no places."""
        places = self._places
        named: list[Slot] = []
        for node, view in zip(plan.nodes, views, strict=True):
            seen = set()
            for use in view.slots:
                key = (use.pool, use.domain)
                slot = node.slots.get(key)
                if slot is None:
                    slot = places.add_slot(node, use.pool, use.domain, use.total)
                places.resize(slot, use.total, use.used)
                named.append(slot)
                seen.add(key)
            if seen:
                for key, slot in node.slots.items():
                    if key not in seen:
                        places.resize(slot, 0, 0)
                places.freshen(node)
        everything = [slot for node in plan.nodes for slot in node.slots.values()]
        plan.layout, plan.totals = layout, totals
        plan.group = places.group(everything) if everything else None
        plan.named = np.array([slot.row for slot in named], np.intp)
        plan.per_pool = np.bincount(places.slots.pool[plan.named]).astype(np.float64)

    def _take_nodes(self, plan: _Plan, views: Views) -> None:
        nodes, rows = self._places.nodes, plan.node_rows
        figures = chain.from_iterable([_LOAD(view.load) for view in views])
        heard = np.fromiter(figures, np.float64, len(FIGURES) * len(views))
        loads = (1.0 - _SMOOTHING) * nodes.loads[rows]
        loads += _SMOOTHING * heard.reshape(len(views), len(FIGURES))
        nodes.loads[rows] = loads
        nodes.worst[rows] = loads[:, : len(RESOURCES)].max(axis=1)
        nodes.costs[:, rows] = load_costs(loads)
        nodes.running[rows] = [view.running for view in views]
        nodes.queued[rows] = [view.queued for view in views]
        nodes.beat_age_s[rows] = [view.beat_age_s for view in views]
        nodes.version += 1

    def _be_surprised(self, plan: _Plan, off: Ints) -> None:
        """Remember how far the beats are from what our own doings let us expect."""
        slots, named = self._places.slots, plan.named
        shares = off / np.maximum(slots.total[named], 1)
        squares = np.bincount(slots.pool[named], shares * shares)
        means = squares / np.maximum(plan.per_pool, 1.0)
        for number, (mean, count) in enumerate(zip(means.tolist(), plan.per_pool, strict=True)):
            if count:
                offers = self._places.by_number[number]
                offers.surprise += _SURPRISE_MEMORY * (mean - offers.surprise)


def _settle(node: Node, beat_at: float) -> None:
    """Take back corrections that the beat already contains."""
    takes, gives = node.takes, node.gives
    while takes and takes[0][0] <= beat_at - _TAKE_LAG_S:
        slot = takes.popleft()[1]
        slot.columns.pending_v[slot.row] -= 1
    while gives and gives[0][0] <= beat_at:
        slot = gives.popleft()[1]
        slot.columns.pending_v[slot.row] += 1
