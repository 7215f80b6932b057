"""The log over JetStream, by its headers and its JSON API."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from corefleet.adapters.jetstream import (
    NO_MESSAGE,
    Ack,
    MessageAnswer,
    StreamAnswer,
    answer_error,
    decode_answer,
    stream_config,
    wrong_setting,
)
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_client import Delivery
from corefleet.adapters.nats_follow import NatsFollower
from corefleet.bus import Entry, Stored
from corefleet.errors import CorefleetError, Incompatible, InvalidInput, NotFound, Unavailable
from corefleet.messages.records import ClusterSettings
from corefleet.subjects import (
    Layout,
    stream_create,
    stream_info,
    stream_message,
    stream_messages,
    stream_name,
    stream_name_of,
)

A = TypeVar("A", Ack, StreamAnswer, MessageAnswer)

_READ_BATCH = 256
_ENSURE_S = 10.0
_STREAM_EXISTS = 10058
_STREAM_NOT_FOUND = 10059


class NatsLog:
    """JetStream streams behind the Log protocol.

    A timeout is never retried here: whether the message was stored is for the caller to
    find out (docs/architecture.md, rule 2). `max_bytes` is given to streams that
    `ensure` creates; -1 is no limit. Without `replicas` only a stream's leader is asked for
    messages, one by one: a node may ask nobody else (docs/security.md).
    """

    def __init__(self, bus: NatsBus, max_bytes: int = -1, *, replicas: bool = True) -> None:
        self._bus = bus
        self._replicas = replicas
        self._max_bytes = max_bytes
        self._batches = secrets.token_hex(6)
        self._batch_number = 0

    async def ensure(self, settings: ClusterSettings) -> None:
        layout = Layout(settings.shards, settings.streams)
        for stream in range(layout.streams):
            name = layout.stream_name(stream)
            expected = stream_config(
                name, layout.stream_subjects(stream), settings.replicas, self._max_bytes
            )
            found = await self._api(stream_info(name), None, _ENSURE_S, StreamAnswer)
            if found.error is not None and found.error.err_code == _STREAM_NOT_FOUND:
                found = await self._api(stream_create(name), expected, _ENSURE_S, StreamAnswer)
            if found.error is not None and found.error.err_code == _STREAM_EXISTS:
                found = await self._api(stream_info(name), None, _ENSURE_S, StreamAnswer)
            if found.error is not None:
                raise answer_error(found.error, f"stream {name}")
            wrong = wrong_setting(found.config, expected)
            if wrong is not None:
                raise Incompatible(f"stream {name}: {wrong}")

    async def append(self, entry: Entry, timeout_s: float) -> int:
        answer = await self._bus.call(entry.subject, entry.payload, timeout_s, _headers(entry))
        found = _acknowledged(answer, entry.subject)
        if isinstance(found, CorefleetError):
            raise found
        return found

    def append_soon(
        self, entry: Entry, timeout_s: float, done: Callable[[int | CorefleetError], None]
    ) -> None:
        subject = entry.subject

        def answered(answer: Delivery | CorefleetError) -> None:
            if not isinstance(answer, CorefleetError):
                done(_acknowledged(answer, subject))
            else:
                done(answer)

        try:
            self._bus.ask(subject, entry.payload, timeout_s, _headers(entry), answered)
        except CorefleetError as error:
            asyncio.get_running_loop().call_soon(done, error)

    async def append_batch(self, entries: Sequence[Entry], timeout_s: float) -> int:
        """As the protocol says. At most one entry of a batch may write a fenced subject,
        after the entries that are fenced on it: the server refuses it otherwise.

        A stream of one replica stages each batch in files of its own and flushes them
        (nats-server 2.15: some 5 ms); with more replicas a batch costs what its
        messages cost.
        """
        if len(entries) == 1:
            return await self.append(entries[0], timeout_s)
        if len({stream_name_of(entry.subject) for entry in entries}) != 1:
            subjects = [entry.subject for entry in entries]
            raise InvalidInput("entries", subjects, "one or more entries of one stream")
        self._batch_number += 1
        batch = f"{self._batches}-{self._batch_number}"
        for number, entry in enumerate(entries[:-1], 1):
            headers = f"Nats-Batch-Id: {batch}\r\nNats-Batch-Sequence: {number}\r\n"
            self._bus.send(entry.subject, entry.payload, "", headers + _headers(entry))
        commit = (
            f"Nats-Batch-Id: {batch}\r\nNats-Batch-Sequence: {len(entries)}\r\n"
            "Nats-Batch-Commit: 1\r\n"
        )
        last = entries[-1]
        answer = await self._bus.call(
            last.subject, last.payload, timeout_s, commit + _headers(last)
        )
        found = _acknowledged(answer, last.subject)
        if isinstance(found, CorefleetError):
            raise found
        return found

    async def last(self, subject: str, timeout_s: float) -> Stored | None:
        return await self._message(subject, {"last_by_subj": subject}, timeout_s)

    async def read(self, subject: str, through: int, timeout_s: float) -> list[Stored]:
        """As the protocol says. Raises NotFound when no message of `subject` has the
        sequence `through` any more.

        Any replica is asked first; only its having `through` proves the answer whole,
        else the leader is asked message by message.
        """
        if self._replicas:
            messages = await self._read_replica(subject, through, timeout_s)
            if messages and messages[-1].sequence == through:
                return messages
        return await self._read_leader(subject, through, timeout_s)

    async def follow(
        self,
        stream: int,
        filters: Sequence[str],
        handler: Callable[[Stored], Awaitable[None] | None],
        start: int = 1,
    ) -> NatsFollower:
        """As the protocol says. Raises Unavailable when the stream does not answer."""
        follower = NatsFollower(self._bus, stream_name(stream), filters, handler, start)
        await follower.begin()
        return follower

    async def usage(self, stream: int, timeout_s: float) -> float:
        name = stream_name(stream)
        found = await self._api(stream_info(name), None, timeout_s, StreamAnswer)
        if found.error is not None:
            raise answer_error(found.error, f"stream {name}")
        limit = found.config.get("max_bytes", -1)
        if not isinstance(limit, int) or limit <= 0:
            return 0.0
        return min(1.0, found.state.bytes / limit)

    async def _api(
        self, call: str, body: dict[str, object] | None, timeout_s: float, kind: type[A]
    ) -> A:
        payload = b"" if body is None else msgspec.json.encode(body)
        answer = await self._bus.call(call, payload, timeout_s)
        return decode_answer(answer.payload, kind)

    async def _message(
        self, subject: str, body: dict[str, object], timeout_s: float
    ) -> Stored | None:
        name = stream_name_of(subject)
        answer = await self._api(stream_message(name), body, timeout_s, MessageAnswer)
        if answer.error is not None:
            if answer.error.err_code == NO_MESSAGE:
                return None
            raise answer_error(answer.error, subject)
        if answer.message is None:
            raise Unavailable(f"{subject}: the server answered without a message")
        found = answer.message
        return Stored(found.subject, found.data, found.seq)

    async def _read_replica(self, subject: str, through: int, timeout_s: float) -> list[Stored]:
        found: list[Stored] = []
        start = 1
        while True:
            body = msgspec.json.encode(
                {"next_by_subj": subject, "seq": start, "batch": _READ_BATCH}
            )
            answers = await self._bus.call_many(
                stream_messages(stream_name_of(subject)), body, timeout_s
            )
            for answer in answers[:-1]:
                sequence = int(answer.header(b"Nats-Sequence") or 0)
                if sequence <= through:
                    found.append(Stored(subject, answer.payload, sequence))
                start = sequence + 1
            if len(answers) <= _READ_BATCH or start > through:
                return found

    async def _read_leader(self, subject: str, through: int, timeout_s: float) -> list[Stored]:
        found: list[Stored] = []
        start = 1
        while start <= through:
            message = await self._message(
                subject, {"next_by_subj": subject, "seq": start}, timeout_s
            )
            if message is None or message.sequence > through:
                break
            found.append(message)
            start = message.sequence + 1
        if not found or found[-1].sequence != through:
            raise NotFound(f"{subject}: no message with sequence {through} is left")
        return found


def _headers(entry: Entry) -> str:
    """Return an entry's expectations as header lines."""
    lines = ""
    if entry.fence_sequence is not None:
        lines = f"Nats-Expected-Last-Subject-Sequence: {entry.fence_sequence}\r\n"
        if entry.fence_subject:
            lines += f"Nats-Expected-Last-Subject-Sequence-Subject: {entry.fence_subject}\r\n"
    if entry.rollup:
        lines += "Nats-Rollup: sub\r\n"
    if entry.ttl_s:
        lines += f"Nats-TTL: {entry.ttl_s}\r\n"
    return lines


def _acknowledged(answer: Delivery, subject: str) -> int | CorefleetError:
    """Return the sequence that the server gave the message, or why it gave none."""
    try:
        ack = decode_answer(answer.payload, Ack)
    except Unavailable as error:
        return error
    return ack.seq if ack.error is None else answer_error(ack.error, subject)
