"""Submissions: checked, admitted and made durable, from clients and from agents alike."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from controld.cluster import Cluster
from controld.core.admission import Admission
from controld.gauges import Gauges
from controld.registry import Registry
from corefleet.acceptance import creation, find_out
from corefleet.background import Background, stop
from corefleet.bus import Incoming
from corefleet.codec import decode, encode
from corefleet.errors import (
    CorefleetError,
    Exhausted,
    Fenced,
    InvalidInput,
    NotFound,
    StoreFull,
    Unavailable,
)
from corefleet.ids import (
    check_name,
    check_request_id,
    session_for_request,
    shard_of,
    task_id_of,
)
from corefleet.journal import Patience
from corefleet.messages.records import PoolSpec, TaskRecord
from corefleet.messages.wire import SubmitAnswer, SubmitMessage
from corefleet.subjects import CONTROL_QUEUE, CONTROL_SUBMIT

_log = structlog.get_logger(__name__)

_STORE_S = 2.0
_PATIENCE = Patience(call_s=2.0, give_up_s=6.0)
_WATCH_S = 1.0
_SHARE_WAIT_S = 1.0
"""A submission waits so long for the first token of a share that this controld had not."""
_KINDS = ("compute", "retrieval", "tool", "mixed")
_MAX_DEADLINE_MS = 365 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Submission:
    """What somebody asks for, not yet checked. `deadline_ms` counts from acceptance."""

    pool: str
    session: str
    request_id: str
    input: bytes | str
    deadline_ms: int = 0
    kind: str = ""
    tenant: str = ""
    """Whose it is, at the caller's word; '' is nobody's."""
    submitted_by: str = ""
    """Who the caller is, by certificate or token; '' where nobody is known."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A task that is durable; `duplicate` when its request id had been accepted before."""

    task: str
    session: str
    duplicate: bool


Outcome = Accepted | CorefleetError
Decided = Callable[[Outcome], None]


class Intake:
    """The one road by which tasks come in."""

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        gauges: Gauges,
        admission: Admission,
        backlog: Callable[[], Mapping[str, int]],
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._gauges = gauges
        self._admission = admission
        self._backlog = backlog
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Begin to accept, from agents over the bus too."""
        subscription = await self._cluster.bus.subscribe(
            CONTROL_SUBMIT, self._sent, queue=CONTROL_QUEUE
        )
        self._open.push_async_callback(subscription.close)
        watching = self._background.spawn(self._watch_room(), "room in streams")
        self._open.push_async_callback(stop, watching)

    async def close(self) -> None:
        """Accept nothing more over the bus. Idempotent."""
        await self._open.aclose()

    async def submit(self, asked: Submission) -> Accepted:
        """Check, admit and store one submission; on return it is durable.

        Raises NotFound (pool), InvalidInput naming the field, Exhausted, Conflict (request
        id used for something else), StoreFull, Unavailable.
        """
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def decided(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        self.offer(asked, decided)
        outcome = await future
        if isinstance(outcome, CorefleetError):
            raise outcome
        return outcome

    def offer(
        self, asked: Submission, decided: Decided, begun: Callable[[str], None] | None = None
    ) -> None:
        """Do as `submit` does, with nobody waiting.

        `decided` is called once with the task, durable by then, or with what `submit` would
        raise; before this returns if nothing needs to be stored. `begun` is told the task's
        id before anything is stored, so that no event of it can be missed.
        """
        try:
            record, size = self._record(asked)
            coming_s = self._admit(record, size, _SHARE_WAIT_S)
        except CorefleetError as error:
            self._refuse(error, decided)
            return
        if coming_s:
            waits = self._offer_later(coming_s, record, size, decided, begun)
            self._background.spawn(waits)
        else:
            self._store(record, decided, begun)

    def _admit(self, record: TaskRecord, size: int, left_s: float) -> float:
        """Return 0 when the task is let in, else after how many seconds to ask again.

        That is within `left_s`. Raises InvalidInput and Exhausted.
        """
        now = self._cluster.clock.monotonic()
        refusal = self._admission.admit(record.pool, size, now, record.tenant)
        if refusal is None:
            return 0.0
        if refusal.coming and 0.0 < refusal.retry_after_s <= left_s:
            return refusal.retry_after_s
        self._gauges.not_admitted(record.pool, refusal.cause).inc()
        self._gauges.tallies.of(record.pool).not_admitted += 1
        if refusal.permanent:
            raise InvalidInput("input", f"{size} bytes", refusal.reason)
        raise Exhausted(refusal.reason, refusal.retry_after_s)

    async def _offer_later(
        self,
        coming_s: float,
        record: TaskRecord,
        size: int,
        decided: Decided,
        begun: Callable[[str], None] | None,
    ) -> None:
        clock = self._cluster.clock
        give_up = clock.monotonic() + _SHARE_WAIT_S
        try:
            while coming_s:
                await asyncio.sleep(coming_s)
                coming_s = self._admit(record, size, give_up - clock.monotonic())
        except CorefleetError as error:
            self._refuse(error, decided)
            return
        self._store(record, decided, begun)

    def _store(
        self, record: TaskRecord, decided: Decided, begun: Callable[[str], None] | None
    ) -> None:
        if begun is not None:
            begun(record.task)
        started = self._cluster.clock.monotonic()

        def stored(outcome: int | CorefleetError) -> None:
            if not isinstance(outcome, CorefleetError):
                self._accept(record, False, started, decided)
            elif isinstance(outcome, Fenced | Unavailable) and not isinstance(outcome, StoreFull):
                self._background.spawn(self._find_out(record, started, decided))
            else:
                self._refuse(outcome, decided)

        entry = creation(self._cluster.layout, record)
        self._cluster.log.append_soon(entry, _PATIENCE.call_s, stored)

    async def _find_out(self, record: TaskRecord, started: float, decided: Decided) -> None:
        """The creation was refused or not answered: look what is there."""
        cluster = self._cluster
        try:
            _, duplicate = await find_out(cluster.log, cluster.layout, record, _PATIENCE)
        except CorefleetError as error:
            self._refuse(error, decided)
            return
        self._accept(record, duplicate, started, decided)

    def _accept(
        self, record: TaskRecord, duplicate: bool, started: float, decided: Decided
    ) -> None:
        self._gauges.submit_s().observe(self._cluster.clock.monotonic() - started)
        self._gauges.submissions(record.pool, "true" if duplicate else "false").inc()
        decided(Accepted(record.task, record.session, duplicate))

    def _refuse(self, error: CorefleetError, decided: Decided) -> None:
        self._gauges.refused(type(error).__name__).inc()
        decided(error)

    def _record(self, asked: Submission) -> tuple[TaskRecord, int]:
        """Return the new task that the submission asks for, checked, and its input's bytes."""
        pool = self._pool(asked.pool)
        if asked.session:
            check_name("session", asked.session)
        if asked.tenant:
            check_name("tenant", asked.tenant)
        request_id = check_request_id(asked.request_id)
        session = asked.session or session_for_request(request_id)
        text, size = self._text(asked.input)
        if asked.kind and asked.kind not in _KINDS:
            raise InvalidInput("kind", asked.kind, f"one of {', '.join(_KINDS)}, or none")
        if asked.deadline_ms > _MAX_DEADLINE_MS:
            raise InvalidInput(
                "deadline_ms", asked.deadline_ms, f"at most {_MAX_DEADLINE_MS}, which is a year"
            )
        now_ms = self._cluster.clock.wall_ms()
        allowed_ms = asked.deadline_ms or int(pool.deadline_s * 1000)
        shard = shard_of(pool.name, session, self._cluster.settings.shards)
        made = TaskRecord(
            task=task_id_of(shard, request_id),
            pool=pool.name,
            session=session,
            request_id=request_id,
            input=text,
            pool_class=pool.pool_class,
            kind=asked.kind or pool.kind,
            tenant=asked.tenant,
            submitted_by=asked.submitted_by,
            origin=self._cluster.controld,
            created_ms=now_ms,
            deadline_ms=now_ms + allowed_ms if allowed_ms else 0,
            max_attempts=pool.max_attempts,
            result_ttl_s=pool.result_ttl_s,
            digest=_digest(
                pool.name,
                session,
                asked.kind or pool.kind,
                text,
                *((asked.tenant,) if asked.tenant else ()),
            ),
        )
        return made, size

    def _pool(self, name: str) -> PoolSpec:
        if not name:
            raise InvalidInput("pool", name, "the name of a pool")
        pool = self._registry.pools.records.get(name)
        if pool is None:
            known = ", ".join(sorted(self._registry.pools.records)) or "none yet"
            raise NotFound(f"pool {name[:80]!r}: no such pool; known: {known}")
        return pool

    def _text(self, given: bytes | str) -> tuple[str, int]:
        data = given.encode() if isinstance(given, str) else given
        limit = self._cluster.settings.max_input_bytes
        if len(data) > limit:
            raise InvalidInput("input", f"{len(data)} bytes", f"at most {limit} bytes")
        try:
            return data.decode(), len(data)
        except UnicodeDecodeError as error:
            raise InvalidInput(
                "input", data[error.start : error.start + 8], f"UTF-8; byte {error.start} is not"
            ) from None

    def _sent(self, message: Incoming) -> None:
        self._background.spawn(self._answer(message))

    async def _answer(self, message: Incoming) -> None:
        try:
            asked = decode(message.payload, SubmitMessage)
            accepted = await self.submit(
                Submission(
                    asked.pool, asked.session, asked.request_id, asked.input, tenant=asked.tenant
                )
            )
            answer = SubmitAnswer(
                task=accepted.task, session=accepted.session, duplicate=accepted.duplicate
            )
        except Exhausted as error:
            answer = SubmitAnswer(error=str(error), retry_after_s=error.retry_after_s)
        except Unavailable as error:
            answer = SubmitAnswer(error=str(error), retry_after_s=_WATCH_S)
        except CorefleetError as error:
            answer = SubmitAnswer(error=str(error))
        self._cluster.bus.publish(message.reply, encode(answer))

    async def _watch_room(self) -> None:
        """Keep admission current on how full streams and queues are."""
        log, streams = self._cluster.log, self._cluster.settings.streams
        while True:
            try:
                usages = [await log.usage(stream, _STORE_S) for stream in range(streams)]
                self._admission.set_stream_usage(max(usages))
                self._gauges.stream_used().set(max(usages))
            except Unavailable as error:
                _log.debug("room in streams not known", error=str(error))
            backlog = self._backlog()
            for pool in self._registry.pools.records:
                self._admission.set_backlog(pool, backlog.get(pool, 0))
            await asyncio.sleep(_WATCH_S)


def _digest(*parts: str) -> bytes:
    """Return what tells a repeated submission from another one with its request id."""
    what = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        what.update(len(data).to_bytes(4, "big"))
        what.update(data)
    return what.digest()
