"""What is held is unplaceable and not gone; what was withdrawn is as if it had never been."""

from __future__ import annotations

from controld.core.fleet import Fleet, FleetDelta
from controld.core.loss_gate import LossGate
from controld.core.mass_loss import MassLoss, MassLossLimits
from corefleet.messages.records import DomainInfo, LostNode, NodeRegistration, PoolSpec
from corefleet.messages.wire import NodeState, NodeView, RackDigest, SlotUse, Verdict

NAMES = ("a", "b", "c")


class Gated:
    """Three nodes of one rack, one of which may be lost unasked."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.guard = MassLoss(MassLossLimits(max_lost_share=0.0, max_lost_floor=1))
        self.gate = LossGate(self.fleet, self.guard)
        self.number = 0
        self.fleet.set_pools({"p": PoolSpec(name="p")})
        for name in NAMES:
            self.gate.registered(self.registration(name, 1), 0.0)
        self.digest(a="ready", b="ready", c="ready")

    @staticmethod
    def registration(name: str, epoch: int) -> NodeRegistration:
        domain = DomainInfo(domain=0, cpus="0", slots={"p": 2})
        return NodeRegistration(node=name, epoch=epoch, rack="r", domains=(domain,))

    def digest(self, rack_epoch: int = 1, **states: NodeState) -> FleetDelta:
        self.number += 1
        use = (SlotUse("p", 0, 2, 0),)
        views = tuple(
            NodeView(node=node, epoch=1, state=state, slots=use) for node, state in states.items()
        )
        digest = RackDigest(
            rack="r", controld="c1", epoch=rack_epoch, number=self.number, nodes=views
        )
        return self.gate.digest(digest, 1.0)

    def verdict(self, node: str, rack_epoch: int = 1) -> list[str]:
        verdict = Verdict(
            rack="r", rack_epoch=rack_epoch, node=node, node_epoch=1, state="lost", reason="x"
        )
        return [gone.node for gone in self.gate.verdict(verdict, 1.0).gone]

    def states(self) -> dict[str, str]:
        return {status.registration.node: status.state for status in self.fleet.nodes()}

    def open(self) -> int:
        offers = self.fleet.offers("p")
        assert offers is not None
        return len(offers.open)


def test_what_is_held_gets_nothing_new_and_keeps_its_attempts() -> None:
    gated = Gated()
    assert gated.open() == 3
    assert gated.verdict("a") == ["a"]
    assert gated.verdict("b") == []
    assert gated.states() == {"a": "lost", "b": "held", "c": "ready"}
    assert gated.open() == 1
    assert gated.fleet.is_gone("a", 1)
    assert not gated.fleet.is_gone("b", 1), "no inventory takes them away either"


def test_digests_repeat_what_is_held_and_count_nothing_twice() -> None:
    gated = Gated()
    gated.verdict("a")
    gated.verdict("b")
    assert gated.digest(a="lost", b="lost", c="lost").gone == []
    assert gated.states() == {"a": "lost", "b": "held", "c": "held"}


def test_the_store_releases_what_is_held() -> None:
    gated = Gated()
    for name in NAMES:
        gated.verdict(name)
    delta = gated.gate.lost(LostNode(node="b", epoch=1, reason="x"), 2.0)
    assert [gone.node for gone in delta.gone] == ["b"]
    assert gated.guard.held == {"c": 1}
    assert gated.states()["b"] == "lost"


def test_an_owner_that_finds_the_node_again_withdraws_its_verdict() -> None:
    gated = Gated()
    for name in NAMES:
        gated.verdict(name)
    gated.digest(a="ready", b="ready", c="suspect")
    assert gated.states() == {"a": "ready", "b": "ready", "c": "suspect"}
    assert gated.guard.held == {}
    assert not gated.fleet.is_gone("a", 1), "given up unasked, and there again"
    assert gated.open() == 2


def test_what_stands_in_the_store_is_not_revived_by_a_digest() -> None:
    gated = Gated()
    gated.verdict("a")
    gated.gate.lost(LostNode(node="a", epoch=1), 2.0)
    gated.digest(a="ready")
    assert gated.states()["a"] == "lost"


def test_an_older_owners_digest_or_verdict_changes_nothing() -> None:
    gated = Gated()
    gated.digest(2, a="ready")
    assert gated.verdict("a", rack_epoch=1) == []
    gated.verdict("a", rack_epoch=2)
    gated.digest(1, a="ready")
    assert gated.states()["a"] == "lost"


def test_what_its_owner_holds_is_voted_on_by_those_who_gave_it_up_too() -> None:
    gated = Gated()
    gated.verdict("a")
    gated.digest(a="held", b="held")
    assert gated.guard.held == {"a": 1, "b": 1}
    assert gated.states() == {"a": "lost", "b": "held", "c": "ready"}


def test_a_held_node_that_starts_anew_ends_its_own_attempts() -> None:
    gated = Gated()
    for name in NAMES:
        gated.verdict(name)
    delta = gated.gate.registered(gated.registration("b", 2), 2.0)
    assert [(gone.node, gone.node_epoch) for gone in delta.gone] == [("b", 1)]
    assert gated.guard.held == {"c": 1}
    gated.gate.removed("c", 2.0)
    assert gated.guard.held == {}
