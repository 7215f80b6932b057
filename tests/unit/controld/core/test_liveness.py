"""Deadlines, probes and verdicts of a rack."""

from __future__ import annotations

from controld.core.liveness_io import (
    BeatReceived,
    BusConnection,
    LivenessEvent,
    LivenessTick,
    LostSeen,
    NodeRegisteredEvent,
    NodeRemoved,
    Probe,
    ProbeAnswered,
    PublishDigest,
    PushVerdict,
    StoreLost,
    SuspicionOver,
)
from corefleet.messages.records import LostNode
from corefleet.messages.wire import Heartbeat, LoadVector
from tests.unit.controld.core.driven_rack import DrivenRack


def test_a_beating_node_is_ready_and_never_probed() -> None:
    rack = DrivenRack("a")
    rack.wait(3.0, beating=("a",))
    assert rack.all(Probe) == []
    view = rack.view()
    assert view is not None
    assert view.state == "ready"
    assert 0 <= view.beat_age_s <= 0.2


def test_rule_11_two_missed_beats_probe_and_three_condemn_at_once() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    rack.wait(2.0)
    assert rack.when(Probe)[0] == 0.45
    assert rack.when(PushVerdict) == [0.65]
    assert rack.when(StoreLost) == [0.65]
    lost = rack.all(StoreLost)[0].lost
    assert (lost.node, lost.epoch, lost.by, lost.at_ms) == ("a", 1, "c1", 100650)
    verdict = rack.all(PushVerdict)[0].verdict
    assert (verdict.rack, verdict.rack_epoch, verdict.state) == ("r1", 7, "lost")
    view = rack.view()
    assert view is not None
    assert view.state == "lost", "digests repeat it"


def test_rule_11_a_probe_that_times_out_late_condemns_when_it_does() -> None:
    rack = DrivenRack("a")
    rack.beat()
    rack.wait(0.75)
    assert rack.states() == [], "nobody knows yet whether somebody answers"
    rack.feed(ProbeAnswered("a", 1, "nobody"))
    assert rack.states() == ["lost"]


def test_probes_go_on_one_at_a_time_while_the_node_is_silent() -> None:
    rack = DrivenRack("a")
    rack.beat()
    rack.wait(0.55)
    assert len(rack.all(Probe)) == 1
    rack.feed(ProbeAnswered("a", 1, "alive"))
    rack.wait(0.14)
    assert len(rack.all(Probe)) == 1
    rack.wait(0.02)
    assert len(rack.all(Probe)) == 2
    assert rack.all(Probe)[0] == Probe("a", 1, "a:9")


def test_rule_10_a_node_that_answers_probes_is_cut_and_not_lost() -> None:
    rack = DrivenRack("a", answers=True)
    rack.beat()
    rack.wait(2.9)
    assert rack.states() == []
    view = rack.view()
    assert view is not None
    assert view.state == "suspect"
    rack.wait(0.2)
    assert rack.states() == ["cut"]
    assert rack.when(PushVerdict) == [3.0]
    assert rack.all(StoreLost) == []
    rack.beat()
    rack.wait(0.3, beating=("a",))
    view = rack.view()
    assert view is not None
    assert view.state == "ready"


def test_a_cut_node_whose_port_dies_too_is_lost() -> None:
    rack = DrivenRack("a", answers=True)
    rack.beat()
    rack.wait(3.1)
    rack.answers = False
    rack.wait(0.3)
    assert rack.states() == ["cut", "lost"]


def test_a_beat_saves_a_suspect_and_outdates_the_probe() -> None:
    rack = DrivenRack("a")
    rack.beat()
    rack.wait(0.5)
    rack.beat()
    rack.feed(ProbeAnswered("a", 1, "nobody"))
    rack.wait(0.5)
    assert rack.states() == []
    rack.wait(0.3)
    assert rack.states() == [], "the old probe says nothing of the new silence"


def test_rule_10_no_verdict_while_our_own_connection_is_down() -> None:
    rack = DrivenRack("a", "b", answers=False)
    rack.beat("a")
    rack.wait(0.4)
    rack.feed(BusConnection(False))
    rack.wait(5.0)
    assert rack.all(Probe) == []
    assert rack.states() == []
    rack.feed(BusConnection(True))
    rack.wait(0.6)
    assert rack.states() == [], "deadlines count from the reconnect"
    rack.wait(0.1)
    assert rack.states() == ["lost", "lost"]


def test_rule_10_a_restart_of_nats_condemns_nobody_who_comes_back_in_time() -> None:
    nodes = tuple(f"n{index}" for index in range(40))
    rack = DrivenRack(*nodes, answers=True)
    rack.wait(1.0, beating=nodes)
    rack.wait(2.5)
    rack.wait(1.0, beating=nodes)
    assert rack.states() == []


def test_rule_10_a_new_owner_counts_deadlines_from_its_take_over() -> None:
    rack = DrivenRack("a", answers=False)
    rack.wait(0.6)
    assert rack.states() == []
    rack.wait(0.1)
    assert rack.states() == ["lost"]


def test_a_new_owner_says_nothing_of_nodes_it_has_not_heard_of() -> None:
    rack = DrivenRack("a", "b")
    rack.beat("a")
    rack.wait(0.3)
    assert rack.view("a") is not None
    assert rack.view("b") is None


def test_rule_8_beats_of_a_lost_epoch_do_not_revive_it_and_are_told_their_verdict() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    rack.wait(1.0)
    assert rack.states() == ["lost"]
    rack.wait(2.5, beating=("a",))
    view = rack.view()
    assert view is not None
    assert view.state == "lost"
    assert 2 <= len(rack.states()) - 1 <= 3, "at most one a second"
    assert len(rack.all(StoreLost)) == 1


def test_rule_8_a_new_owner_keeps_the_verdicts_that_stand_in_the_store() -> None:
    for first in ("registration", "verdict"):
        rack = DrivenRack()
        events: list[LivenessEvent] = [
            NodeRegisteredEvent(rack.registration("a", epoch=3)),
            LostSeen(LostNode(node="a", epoch=3)),
        ]
        for event in events if first == "registration" else events[::-1]:
            rack.feed(event)
        rack.beat("a", epoch=3)
        rack.wait(0.3)
        view = rack.view()
        assert view is not None, first
        assert view.state == "lost", first
        assert rack.all(StoreLost) == []


def test_a_newer_registration_revives_the_node_and_ignores_the_old_epochs_beats() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    rack.wait(1.0)
    rack.feed(NodeRegisteredEvent(rack.registration("a", epoch=2)))
    rack.beat("a", epoch=1)
    rack.wait(0.3)
    assert rack.view() is None
    rack.beat("a", epoch=2)
    rack.wait(0.3)
    view = rack.view()
    assert view is not None
    assert (view.state, view.epoch) == ("ready", 2)


def test_an_older_registration_changes_nothing_and_the_same_one_keeps_the_deadline() -> None:
    rack = DrivenRack("a", answers=False)
    rack.feed(NodeRegisteredEvent(rack.registration("a", epoch=2)))
    rack.feed(NodeRegisteredEvent(rack.registration("a", epoch=1)))
    rack.wait(0.4)
    rack.feed(NodeRegisteredEvent(rack.registration("a", epoch=2)))
    rack.wait(0.3)
    assert rack.all(StoreLost)[0].lost.epoch == 2


def test_overtaken_beats_are_no_sign_of_life() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    old = Heartbeat(node="a", rack="r1", epoch=1, number=0)
    for _ in range(8):
        rack.wait(0.1)
        rack.feed(BeatReceived(old))
    assert len(rack.all(StoreLost)) == 1


def test_beats_of_a_node_whose_main_loop_is_dead_are_no_sign_of_life() -> None:
    rack = DrivenRack("a", answers=True)
    rack.beat()
    for _ in range(40):
        rack.wait(0.1)
        rack.beat(loop_age_s=6.0)
    assert rack.states() == ["cut"]


def test_digests_go_out_four_times_a_second_numbered_and_with_the_newest_load() -> None:
    rack = DrivenRack("a")
    rack.feed(LivenessTick())
    number = len(rack.all(PublishDigest))
    rack.number += 1
    beat = Heartbeat(
        node="a", rack="r1", epoch=1, number=rack.number, load=LoadVector(cpu=0.7), running=3
    )
    rack.feed(BeatReceived(beat))
    rack.wait(2.0)
    digests = [action.digest for action in rack.all(PublishDigest)]
    assert 8 <= len(digests) - number <= 9
    assert [digest.number for digest in digests] == list(range(1, len(digests) + 1))
    assert {(d.rack, d.controld, d.epoch) for d in digests} == {("r1", "c1", 7)}
    view = rack.view()
    assert view is not None
    assert (view.load.cpu, view.running) == (0.7, 3)


def test_draining_nodes_are_shown_as_such() -> None:
    rack = DrivenRack("a")
    rack.beat()
    rack.feed(NodeRegisteredEvent(rack.registration("a", draining=True)))
    rack.wait(0.3, beating=("a",))
    view = rack.view()
    assert view is not None
    assert view.state == "draining"


def test_removed_and_unknown_nodes_are_forgotten() -> None:
    rack = DrivenRack("a", answers=False)
    rack.feed(NodeRemoved("a"))
    rack.beat("a")
    rack.beat("zz")
    rack.feed(ProbeAnswered("zz", 1, "nobody"))
    rack.wait(1.0)
    assert rack.states() == []


def test_a_probe_that_is_never_answered_is_sent_again() -> None:
    rack = DrivenRack("a")
    rack.beat()
    rack.wait(1.2)
    assert len(rack.all(Probe)) == 2


def test_a_node_whose_agentd_restarts_keeps_its_attempts_and_gets_nothing_new() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    for tenths in range(45):
        rack.wait(0.1)
        rack.beat(loop_age_s=tenths / 10)
    view = rack.view()
    assert view is not None
    assert view.state == "suspect"
    assert rack.states() == []
    rack.beat(loop_age_s=0.0)
    rack.wait(0.3)
    assert (view := rack.view()) is not None
    assert view.state == "ready"


def test_an_announced_restart_may_take_as_long_as_announced_but_not_for_ever() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    for second in range(200):
        rack.wait(0.2)
        rack.beat(loop_age_s=second / 5, restart_grace_s=30.0)
        if second / 5 < 29.0:
            assert rack.states() == [], second / 5
    assert rack.states()[0] == "lost"
    other = DrivenRack("a", answers=False)
    for _ in range(20):
        other.wait(0.2)
        other.beat(loop_age_s=61.0, restart_grace_s=1e9)
    assert set(other.states()) == {"lost"}, "what is announced is bounded"


def test_rule_10_who_stood_still_counts_no_silence_of_that_time() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    rack.wait(0.1)
    rack.now += 5.0
    rack.feed(LivenessTick())
    rack.wait(0.4)
    assert rack.all(Probe) == [], "beats may wait unread"
    rack.wait(0.3)
    assert rack.states() == ["lost"]


def test_a_probe_that_could_not_be_made_condemns_nobody() -> None:
    rack = DrivenRack("a")
    rack.beat()
    for _ in range(100):
        rack.wait(0.05)
        if rack.core and rack.all(Probe):
            rack.feed(ProbeAnswered("a", 1, "unable"))
    assert rack.states() == []
    rack.feed(ProbeAnswered("a", 1, "nobody"))
    assert rack.states() == ["lost"]


def test_a_suspicion_that_ends_without_a_verdict_is_told_once() -> None:
    rack = DrivenRack("a", answers=True)
    rack.beat()
    rack.wait(0.5)
    rack.beat()
    rack.wait(1.0, beating=("a",))
    rack.beat(loop_age_s=2.0)
    rack.beat()
    assert rack.all(SuspicionOver) == [SuspicionOver("a")], "late loops are no silence"


def test_rule_8_a_node_waits_for_the_store_before_it_gives_its_attempts_up() -> None:
    rack = DrivenRack("a", answers=False)
    rack.beat()
    rack.wait(1.0)
    first = rack.all(PushVerdict)[0]
    assert first.verdict.provisional
    assert first.silence_s is not None
    assert 0.65 <= first.silence_s < 0.7
    view = rack.view()
    assert view is not None
    assert view.provisional
    rack.feed(LostSeen(rack.all(StoreLost)[0].lost))
    rack.wait(1.0, beating=("a",))
    assert (view := rack.view()) is not None
    assert (view.state, view.provisional) == ("lost", False)
    told = rack.all(PushVerdict)[-1]
    assert (told.verdict.provisional, told.silence_s) == (False, None)
