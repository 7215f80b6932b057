"""What goes into the node's core and what comes out of it.

The shell carries out actions in order. Each OpenJournal, AppendJournal and FinishJournal
is answered by exactly one event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from corefleet.messages.links import (
    AttemptOver,
    FinishTask,
    RunResumed,
    StepsAppended,
    YieldTask,
)
from corefleet.messages.records import Step
from corefleet.messages.wire import (
    AssignAnswer,
    Assignment,
    InventoryAnswer,
    InventoryQuery,
    TaskEvent,
    TaskReturned,
)


class Place(NamedTuple):
    """Where slots are counted: a pool in a domain."""

    pool: str
    domain: int


class PlaceSpec(msgspec.Struct, frozen=True):
    """What a place offers. `workers` is how many of its workers are at work, not spare."""

    slots: int
    workers: int
    progress_timeout_s: float
    model: str = ""


# Events.


class Registered(msgspec.Struct, frozen=True):
    """The control plane gave this node an epoch."""

    epoch: int


class EpochLost(msgspec.Struct, frozen=True):
    """The control plane holds this epoch for dead: all that runs here belongs to others."""

    reason: str


class PlacesSet(msgspec.Struct, frozen=True):
    """All places of the plan."""

    places: Mapping[Place, PlaceSpec]


class EngineUsable(msgspec.Struct, frozen=True):
    """Whether the engine of a model in a domain can be counted on."""

    model: str
    domain: int
    usable: bool


class Draining(msgspec.Struct, frozen=True):
    """Take nothing new from now on."""

    reason: str


class Offered(msgspec.Struct, frozen=True):
    item: Assignment


class Adopted(msgspec.Struct, frozen=True):
    """A worker runs an attempt that an earlier agentd accepted."""

    worker: str
    item: Assignment


class Dropped(msgspec.Struct, frozen=True):
    """The attempt, and every earlier one of the task, is over."""

    task: str
    attempt: int
    reason: str


class YieldAsked(msgspec.Struct, frozen=True):
    """Its owner wants the attempt back at its next step boundary; may be said again and again."""

    task: str
    attempt: int
    reason: str


class InventoryAsked(msgspec.Struct, frozen=True):
    query: InventoryQuery


class JournalOpened(msgspec.Struct, frozen=True):
    """`steps` are those that earlier attempts committed."""

    task: str
    attempt: int
    steps: tuple[Step, ...]


class JournalAppended(msgspec.Struct, frozen=True):
    task: str
    attempt: int


class JournalFinished(msgspec.Struct, frozen=True):
    """The task's end is durable; its watchers were told."""

    task: str
    attempt: int


class JournalLost(msgspec.Struct, frozen=True):
    """The fence is gone: somebody else has the task, or it has ended."""

    task: str
    attempt: int
    reason: str


class JournalRefused(msgspec.Struct, frozen=True):
    """What the worker wants to write can never be stored: the task has to fail."""

    task: str
    attempt: int
    reason: str


class CannotGoOn(msgspec.Struct, frozen=True):
    """The journal could not be written for too long, or no worker can be told to run it."""

    task: str
    attempt: int
    reason: str


class WorkerReady(msgspec.Struct, frozen=True):
    worker: str
    place: Place


class WorkerLeaving(msgspec.Struct, frozen=True):
    """The worker was asked to end: it goes on with what it has and takes nothing new."""

    worker: str


class WorkerGone(msgspec.Struct, frozen=True):
    """The worker is dead or its link is closed; it can do nothing more."""

    worker: str
    reason: str


class StepsOffered(msgspec.Struct, frozen=True):
    """A worker wants steps journaled."""

    worker: str
    task: str
    attempt: int
    steps: tuple[Step, ...]
    events: tuple[TaskEvent, ...]


class FinishAsked(msgspec.Struct, frozen=True):
    worker: str
    finish: FinishTask


class ReturnAsked(msgspec.Struct, frozen=True):
    worker: str
    task: str
    attempt: int
    reason: str


class EventsEmitted(msgspec.Struct, frozen=True):
    worker: str
    task: str
    attempt: int
    events: tuple[TaskEvent, ...]


class NodeTick(msgspec.Struct, frozen=True):
    pass


NodeEvent = (
    Registered
    | EpochLost
    | PlacesSet
    | EngineUsable
    | Draining
    | Offered
    | Adopted
    | Dropped
    | YieldAsked
    | InventoryAsked
    | JournalOpened
    | JournalAppended
    | JournalFinished
    | JournalLost
    | JournalRefused
    | CannotGoOn
    | WorkerReady
    | WorkerLeaving
    | WorkerGone
    | StepsOffered
    | FinishAsked
    | ReturnAsked
    | EventsEmitted
    | NodeTick
)


# Actions.


class Answer(msgspec.Struct, frozen=True):
    """Answer the assignment."""

    answer: AssignAnswer


class AnswerInventory(msgspec.Struct, frozen=True):
    answer: InventoryAnswer


class OpenJournal(msgspec.Struct, frozen=True):
    """Take the attempt's journal over and read what earlier attempts committed.

    `adopted`: the attempt is under way, and so is its journal.
    """

    item: Assignment
    adopted: bool = False


class AppendJournal(msgspec.Struct, frozen=True):
    item: Assignment
    steps: tuple[Step, ...]


class FinishJournal(msgspec.Struct, frozen=True):
    """End the task. `steps` are all its committed steps, for the trace in short form."""

    item: Assignment
    finish: FinishTask
    steps: tuple[Step, ...]


class CloseJournal(msgspec.Struct, frozen=True):
    """Nothing more is written for this attempt."""

    task: str
    attempt: int


class RunOn(msgspec.Struct, frozen=True):
    """Have a worker run the attempt. `steps` are the committed ones."""

    worker: str
    item: Assignment
    steps: tuple[Step, ...]


class ToWorker(msgspec.Struct, frozen=True):
    worker: str
    frame: StepsAppended | AttemptOver | RunResumed | YieldTask


class PublishEvents(msgspec.Struct, frozen=True):
    """Tell the task's watchers, by way of the controld that accepted it."""

    origin: str
    task: str
    events: tuple[TaskEvent, ...]


class PublishReturned(msgspec.Struct, frozen=True):
    returned: TaskReturned


NodeAction = (
    Answer
    | AnswerInventory
    | OpenJournal
    | AppendJournal
    | FinishJournal
    | CloseJournal
    | RunOn
    | ToWorker
    | PublishEvents
    | PublishReturned
)
