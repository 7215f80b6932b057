"""The exception tree: everything corefleet raises on purpose."""

from __future__ import annotations


class CorefleetError(Exception):
    """Root of every error that corefleet raises on purpose."""


class InvalidInput(CorefleetError):
    """A value from outside is not usable; names field, value and what would be right."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        super().__init__(f"{field}: {shown} is not valid; expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class ConfigError(CorefleetError):
    """A configuration file is wrong; names file, key and what would be right."""


class NotFound(CorefleetError):
    """The named pool, task, session or node does not exist."""


class Conflict(CorefleetError):
    """The request contradicts what is stored, e.g. a request id with other content."""


class Exhausted(CorefleetError):
    """Too much for now; `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(CorefleetError):
    """A server or peer does not answer; the same call may be tried again."""


class Timeout(Unavailable):
    """No answer within the deadline: the effect is unknown."""


class NoResponders(Unavailable):
    """Nobody listens on the subject: the request had no effect."""


class Unauthenticated(CorefleetError):
    """The server does not know who calls: the message says what is missing or wrong."""


class PermissionDenied(CorefleetError):
    """Who calls is known and may not do this; names who, verb and pool."""


class Fenced(CorefleetError):
    """An expectation on a sequence or revision failed: somebody else wrote first."""


class StoreFull(Unavailable):
    """The stream refuses new messages because it has no room."""


class Incompatible(CorefleetError):
    """A server or peer is of a version or configuration that cannot be used."""


class CorruptRecord(CorefleetError):
    """Stored bytes do not decode as the record they should be."""


class LaunchFailed(CorefleetError):
    """A process did not start, or is not bound as it was asked to be."""


class ModelUnusable(CorefleetError):
    """A model file is missing, damaged or not loadable; names the file and why."""


class ToolFailed(CorefleetError):
    """A tool refused its arguments or raised; the message is for the agent."""


class InferFailed(CorefleetError):
    """The model gave no answer, and asking the same again would not help."""


class SendFailed(CorefleetError):
    """A message to another session was refused; the message says why."""


class AttemptDropped(CorefleetError):
    """This attempt may not go on: its fence is gone or it was told to stop."""


class IllegalTransition(CorefleetError):
    """A state machine was asked for a move that its table does not have."""

    def __init__(self, subject: str, start: str, finish: str, story: str) -> None:
        super().__init__(f"{subject}: no transition {start} -> {finish}; story: {story}")
        self.start = start
        self.finish = finish
