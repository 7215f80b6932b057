"""What all controlds find of held losses, and what most of them agree on.

Every controld looks at the held nodes itself and tells the others. Only the owner of a
node's rack acts on the count, so that there is one decision; the store tells it to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

from controld.core.liveness_io import Found
from corefleet.messages.wire import LossVote

VALID_S = 2.0
"""A finding counts for so long: ours since the look, another's since its vote came."""

MOST_A_ROUND = 256
"""Nodes that one controld looks at in one round, those first that it saw longest ago."""

Decision = Literal["agreed", "withdrawn"]


class LossVotes:
    """The votes as one controld knows them, its own included."""

    def __init__(self, controld: str) -> None:
        self._controld = controld
        self._number = 0
        self._found: dict[str, tuple[float, Found]] = {}
        self._votes: dict[str, tuple[float, LossVote]] = {}

    def due(self, held: Mapping[str, int]) -> list[str]:
        """Return which held nodes to look at in this round; forgets all others."""
        self._found = {node: found for node, found in self._found.items() if node in held}
        never = float("-inf")
        oldest = sorted(held, key=lambda node: (self._found.get(node, (never,))[0], node))
        return oldest[:MOST_A_ROUND]

    def found(self, node: str, found: Found, now: float) -> None:
        """Take our own finding; a look that could not be made says nothing."""
        if found != "unable":
            self._found[node] = (now, found)

    def vote(self, now: float) -> LossVote:
        """Return our newest vote, to be told to all; it counts here, too."""
        self._number += 1
        fresh = {node: what for node, (at, what) in self._found.items() if now - at < VALID_S}
        vote = LossVote(
            controld=self._controld,
            number=self._number,
            unreachable=tuple(sorted(node for node in fresh if fresh[node] == "nobody")),
            reachable=tuple(sorted(node for node in fresh if fresh[node] == "alive")),
        )
        self._votes[self._controld] = (now, vote)
        return vote

    def voted(self, vote: LossVote, now: float) -> None:
        """Take another's vote; overtaken ones are ignored while newer ones count."""
        if vote.controld == self._controld:
            return
        known = self._votes.get(vote.controld)
        if known is not None and now - known[0] < VALID_S and vote.number <= known[1].number:
            return
        self._votes[vote.controld] = (now, vote)

    def decisions(
        self, nodes: AbstractSet[str], members: AbstractSet[str], now: float
    ) -> dict[str, Decision]:
        """Return what most of `members`, the living controlds, agree on for each of `nodes`."""
        self._votes = {
            name: (at, vote)
            for name, (at, vote) in self._votes.items()
            if name in members and now - at < VALID_S
        }
        majority = len(members) // 2 + 1
        unreachable: dict[str, int] = {}
        reachable: dict[str, int] = {}
        for _, vote in self._votes.values():
            for named, count in ((vote.unreachable, unreachable), (vote.reachable, reachable)):
                for node in named:
                    if node in nodes:
                        count[node] = count.get(node, 0) + 1
        decided: dict[str, Decision] = {}
        for node in nodes:
            if unreachable.get(node, 0) >= majority:
                decided[node] = "agreed"
            elif reachable.get(node, 0) >= majority:
                decided[node] = "withdrawn"
        return decided
