"""What a worker keeps for the agentd that comes after the one that died."""

from __future__ import annotations

from agentd.worker.backlog import MOST_HELD_EVENTS, Backlog
from corefleet.messages.links import (
    AppendSteps,
    AttemptOver,
    EmitEvents,
    FinishTask,
    MessageSent,
    SendMessage,
    StepsAppended,
)

KEY = ("t", 1)
APPEND = AppendSteps(task="t", attempt=1, steps=())
FINISH = FinishTask(task="t", attempt=1, output="o")
EMIT = EmitEvents(task="t", attempt=1, events=())
SUBMIT = SendMessage(call=1, pool="p", session="s", request_id="r", input="")


def test_an_answered_append_is_not_sent_again_and_an_unanswered_one_is() -> None:
    backlog = Backlog()
    assert backlog.sending(APPEND)
    backlog.answered(StepsAppended(task="t", attempt=1))
    backlog.detach((KEY,))
    assert backlog.resume(KEY) == ()
    assert backlog.sending(APPEND)
    backlog.detach((KEY,))
    assert backlog.resume(KEY) == (APPEND,)


def test_what_is_said_without_agentd_waits_in_order_and_the_events_come_first() -> None:
    backlog = Backlog()
    backlog.detach((KEY,))
    assert not backlog.sending(EMIT)
    assert not backlog.sending(FINISH)
    assert backlog.resume(KEY) == (EMIT, FINISH)
    assert backlog.sending(EMIT), "resumed: it goes out at once again"


def test_an_acknowledged_append_does_not_hide_the_finish_after_it() -> None:
    backlog = Backlog()
    backlog.sending(FINISH)
    backlog.answered(StepsAppended(task="t", attempt=1))
    backlog.detach((KEY,))
    assert backlog.resume(KEY) == (FINISH,)


def test_a_second_loss_before_the_attempt_was_resumed_forgets_nothing() -> None:
    backlog = Backlog()
    backlog.sending(APPEND)
    backlog.detach((KEY,))
    backlog.sending(EMIT)
    backlog.detach((KEY,))
    assert backlog.resume(KEY) == (EMIT, APPEND)


def test_an_attempt_that_is_over_leaves_nothing() -> None:
    backlog = Backlog()
    backlog.sending(FINISH)
    backlog.detach((KEY,))
    backlog.answered(AttemptOver(task="t", attempt=1, outcome="dropped"))
    assert backlog.resume(KEY) == ()


def test_events_without_agentd_are_bounded() -> None:
    backlog = Backlog()
    backlog.detach((KEY,))
    for _ in range(MOST_HELD_EVENTS + 5):
        backlog.sending(EMIT)
    assert len(backlog.resume(KEY)) == MOST_HELD_EVENTS


def test_submissions_without_an_answer_are_sent_again() -> None:
    backlog = Backlog()
    assert backlog.sending(SUBMIT)
    assert backlog.detach(()) == (SUBMIT,)
    backlog.answered(MessageSent(call=1, task="t2"))
    assert backlog.detach(()) == ()
