"""Assignments on their way to nodes: those of one loop turn to one node go together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from controld.cluster import Cluster
from controld.core.shard_io import AssignAnswered, AssignUnanswered
from controld.gauges import Gauges
from corefleet.background import Background
from corefleet.codec import decode, encode
from corefleet.errors import CorruptRecord, InvalidInput, Unavailable
from corefleet.messages.records import SessionHead
from corefleet.messages.wire import AssignAnswer, AssignAnswers, AssignBatch, Assignment
from corefleet.subjects import node_assign

Answered = Callable[[AssignAnswered | AssignUnanswered], None]

_ANSWER_S = 0.5
_ITEMS = 128
_BYTES = 512 * 1024
"""Of one batch: well below the megabyte that NATS takes by default."""


class Assigner:
    """Shared by all shards of a controld, so that batching works."""

    def __init__(self, cluster: Cluster, background: Background, gauges: Gauges) -> None:
        self._cluster = cluster
        self._background = background
        self._gauges = gauges
        self._ready: dict[str, list[tuple[Assignment, Answered]]] = {}

    def offer(self, node: str, assignment: Assignment, answered: Answered) -> None:
        """Send the assignment at the end of this loop turn; `answered` is called once."""
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._flush)
        self._ready.setdefault(node, []).append((assignment, answered))

    def _flush(self) -> None:
        ready, self._ready = self._ready, {}
        for node, offers in ready.items():
            for batch in _batches(offers):
                self._background.spawn(self._send(node, batch))

    async def _send(self, node: str, offers: Sequence[tuple[Assignment, Answered]]) -> None:
        batch = AssignBatch(
            controld=self._cluster.controld, items=tuple(assignment for assignment, _ in offers)
        )
        answers: dict[tuple[str, int], AssignAnswer] = {}
        try:
            payload = await self._cluster.bus.request(node_assign(node), encode(batch), _ANSWER_S)
            for answer in decode(payload, AssignAnswers).items:
                answers[answer.task, answer.attempt] = answer
        except (Unavailable, CorruptRecord):
            self._gauges.assignments("none").inc(len(offers))
        except InvalidInput as error:
            # One that NATS will never carry is refused for good, with the reason.
            answers = {
                (a.record.task, a.record.attempt): AssignAnswer(
                    a.record.task, a.record.attempt, accepted=False, reason=str(error)
                )
                for a, _ in offers
            }
        for assignment, answered in offers:
            record = assignment.record
            found = answers.get((record.task, record.attempt))
            if found is None:
                answered(AssignUnanswered(node, record.task, record.attempt))
            else:
                self._gauges.assignments("accepted" if found.accepted else "refused").inc()
                answered(AssignAnswered(node, found))


def _batches(
    offers: Sequence[tuple[Assignment, Answered]],
) -> list[list[tuple[Assignment, Answered]]]:
    batches: list[list[tuple[Assignment, Answered]]] = []
    size = _BYTES
    for offer in offers:
        more = _size(offer[0])
        if size + more > _BYTES or len(batches[-1]) >= _ITEMS:
            batches.append([])
            size = 0
        batches[-1].append(offer)
        size += more
    return batches


def _size(assignment: Assignment) -> int:
    """Return about how many bytes the assignment takes."""
    return 512 + len(assignment.record.input) + _head_size(assignment.head)


def _head_size(head: SessionHead | None) -> int:
    if head is None:
        return 0
    state = head.state
    return sum(len(turn.text) + 32 for turn in state.history) + sum(
        len(key) + len(value) for key, value in state.memory.items()
    )
