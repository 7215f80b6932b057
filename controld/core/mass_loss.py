"""The mass-loss guard: when too much is found lost at once, rather doubt the finder.

One controld's view of verdicts that do not stand in the store yet. Of those within the
window, as many as the limit allows are acted on at once; all others are held: they get
nothing new, but keep their attempts, until the verdict stands in the store. The rack's
owner stores a held one only when most controlds agree (loss_votes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class MassLossLimits:
    """See LivenessConfig."""

    max_lost_share: float = 0.2
    max_lost_floor: int = 8
    mass_window_s: float = 10.0


class MassLoss:
    """Which losses are acted on, held, or settled. A loss is (node, epoch)."""

    def __init__(self, limits: MassLossLimits) -> None:
        self._limits = limits
        self._nodes = 0
        self._drained: AbstractSet[str] = frozenset()
        self._recent: deque[tuple[float, str]] = deque()
        """When, oldest first, we acted on a loss that nobody had agreed on."""
        self._acted: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._shown: dict[str, int] = {}
        """Acted on by us, but held by the owner of its rack."""
        self._stands: dict[str, int] = {}

    @property
    def held(self) -> dict[str, int]:
        """Nodes with a held loss, and its epoch: ours, and those that their racks' owners hold."""
        return self._shown | self._held

    @property
    def limit(self) -> int:
        """Losses within the window that need nobody's consent."""
        return max(self._limits.max_lost_floor, int(self._limits.max_lost_share * self._nodes))

    def cluster(self, nodes: int, drained: AbstractSet[str]) -> None:
        """Take the number of registered nodes, and those whose drain was planned."""
        self._nodes = nodes
        self._drained = drained

    def undecided(self, node: str) -> bool:
        """Return whether a loss of the node waits to stand in the store."""
        return node in self._acted or node in self._held

    def holds(self, node: str, epoch: int) -> bool:
        return epoch <= self._held.get(node, 0)

    def lost(self, node: str, epoch: int, now: float) -> bool:
        """Take a verdict, new or repeated; return whether to act on it now."""
        if epoch <= self._stands.get(node, 0) or epoch <= self._acted.get(node, 0):
            return True
        if epoch <= self._held.get(node, 0):
            return False
        if node not in self._drained:
            if self._held or self._count(node, now) > self.limit:
                self._held[node] = epoch
                return False
            self._recent.append((now, node))
        self._acted[node] = epoch
        return True

    def settle(self, node: str, epoch: int, now: float) -> bool:
        """Return whether the owner of the node's rack may store its verdict without asking."""
        if not self.lost(node, epoch, now):
            return False
        if not self._held or node in self._drained or epoch <= self._stands.get(node, 0):
            return True
        self._shown[node] = epoch
        return False

    def shown_held(self, node: str, epoch: int, now: float) -> bool:
        """The rack's owner holds the loss; return whether we acted on it, or do so now."""
        acted = self.lost(node, epoch, now)
        if acted and epoch > self._stands.get(node, 0):
            self._shown[node] = epoch
        return acted

    def stands(self, node: str, epoch: int) -> None:
        """The verdict stands in the store: it is settled."""
        self._stands[node] = max(epoch, self._stands.get(node, 0))
        self._close(node, epoch)

    def lives(self, node: str, epoch: int) -> bool:
        """The rack's owner does not find the node lost; return whether we had taken it so."""
        return self._close(node, epoch)

    def gone(self, node: str) -> None:
        """The node was removed or started anew: its older epochs are over anyway."""
        self._close(node, 2**62)

    def _close(self, node: str, epoch: int) -> bool:
        found = False
        for losses in (self._acted, self._held, self._shown):
            if losses.get(node, epoch + 1) <= epoch:
                del losses[node]
                found = True
        return found

    def _count(self, node: str, now: float) -> int:
        """Return how many were acted on within the window, with `node` as one of them."""
        recent = self._recent
        while recent and now - recent[0][0] > self._limits.mass_window_s:
            recent.popleft()
        return len({name for _, name in recent} | {node})
