"""What agentd was told and has not answered, kept for the agentd that comes after it. Pure."""

from __future__ import annotations

from collections import deque

from corefleet.messages.links import (
    AgentdToWorker,
    AppendSteps,
    AttemptOver,
    EmitEvents,
    FinishTask,
    Frame,
    MessageSent,
    ReturnTask,
    SendMessage,
    StepsAppended,
)

MOST_HELD_EVENTS = 256
"""Frames of token events kept for each attempt while there is no agentd; the oldest go first:
watchers read the steps and the result from the log."""

Key = tuple[str, int]


class Backlog:
    """Frames by attempt. An attempt is `detached` from the loss of a link to `resume`."""

    def __init__(self) -> None:
        self._unanswered: dict[Key, Frame] = {}
        """The newest frame of each attempt that agentd must answer."""
        self._detached: dict[Key, deque[Frame]] = {}
        self._submissions: dict[int, SendMessage] = {}

    def sending(self, frame: Frame) -> bool:
        """Take note of `frame`; return whether it may be sent on the present link."""
        match frame:
            case SendMessage(call=call):
                self._submissions[call] = frame
            case AppendSteps(task=task, attempt=attempt) | FinishTask(task=task, attempt=attempt):
                self._unanswered[task, attempt] = frame
                return (task, attempt) not in self._detached
            case ReturnTask(task=task, attempt=attempt):
                self._unanswered[task, attempt] = frame
                return (task, attempt) not in self._detached
            case EmitEvents(task=task, attempt=attempt):
                events = self._detached.get((task, attempt))
                if events is not None:
                    events.append(frame)
                    return False
        return True

    def answered(self, message: AgentdToWorker) -> None:
        """agentd said `message`."""
        match message:
            case StepsAppended(task=task, attempt=attempt):
                if isinstance(self._unanswered.get((task, attempt)), AppendSteps):
                    del self._unanswered[task, attempt]
            case AttemptOver(task=task, attempt=attempt):
                self._unanswered.pop((task, attempt), None)
                self._detached.pop((task, attempt), None)
            case MessageSent(call=call):
                self._submissions.pop(call, None)

    def detach(self, attempts: tuple[Key, ...]) -> tuple[SendMessage, ...]:
        """The link is lost: hold what `attempts` say from now on.

        Returns the submissions without an answer, to be sent on the next link: their
        request ids make repeating them harmless.
        """
        for key in attempts:
            self._detached.setdefault(key, deque(maxlen=MOST_HELD_EVENTS))
        return tuple(self._submissions.values())

    def resume(self, key: Key) -> tuple[Frame, ...]:
        """An agentd carries the attempt on: return what it must be told, in order."""
        events = self._detached.pop(key, ())
        unanswered = self._unanswered.get(key)
        return (*events, unanswered) if unanswered is not None else tuple(events)
