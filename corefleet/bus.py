"""The bus: messages that only count now, and the log that keeps what was accepted.

Two protocols with a NATS and an in-memory implementation each, held to one contract
test (tests/contract/test_bus.py, test_log.py). Handlers run on the event loop of the
process, in order per subscription; they must not block it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from corefleet.errors import CorefleetError
from corefleet.messages.records import ClusterSettings


class Incoming(msgspec.Struct, frozen=True, gc=False):
    """A message of core NATS. `reply` is '' unless the sender asks for an answer."""

    subject: str
    payload: bytes
    reply: str


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A message of a stream. `sequence` counts over the whole stream."""

    subject: str
    payload: bytes
    sequence: int


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A message to append, with what must hold for the append to be taken.

    `fence_sequence` is the sequence that the last message of `fence_subject` must
    have, 0 meaning that the subject has none; None expects nothing. `fence_subject`
    '' is the entry's own subject; another one must lie in the same stream, and may have
    `*` for a token that is not the last: then no newer message may be on any of the
    subjects that it stands for.
    `rollup` drops the subject's earlier messages. `ttl_s` is whole seconds, 0 for ever.
    """

    subject: str
    payload: bytes
    fence_sequence: int | None = None
    fence_subject: str = ""
    rollup: bool = False
    ttl_s: int = 0


class Subscription(Protocol):
    async def close(self) -> None:
        """Stop delivery; no handler runs after this returns."""


class Bus(Protocol):
    """Core messaging: at most once, never stored."""

    def publish(self, subject: str, payload: bytes) -> None:
        """Queue a message for sending; dropped while disconnected."""

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Return the first answer. Raises NoResponders at once, Timeout, Unavailable."""

    async def subscribe(
        self, subject: str, handler: Callable[[Incoming], None], queue: str = ""
    ) -> Subscription:
        """Call `handler` for each message, one after another; answer with publish(reply)."""

    @property
    def connected(self) -> bool:
        """False while the server cannot be reached."""

    def on_connection(self, listener: Callable[[bool], None]) -> None:
        """Call `listener(connected)` whenever that changes."""

    async def close(self) -> None:
        """Flush and disconnect. Idempotent."""


class Follower(Protocol):
    """A consumer that delivers a stream's messages in order, each once, without gaps.

    It outlives reconnects and restarts of the server by going on behind the last
    message that it delivered.
    """

    async def close(self) -> None:
        """Stop delivery; the handler does not run after this returns."""


class Log(Protocol):
    """The durable streams.

    Every append raises, within its deadline, one of: Fenced (an expectation does not
    hold; nothing stored), StoreFull (nothing stored), Timeout (unknown), Unavailable
    (unknown). Reads are answered by the stream's leader unless said otherwise.
    """

    async def ensure(self, settings: ClusterSettings) -> None:
        """Create the streams, or verify that those there are configured as they must be.

        discard new, no age limit, atomic batches, message TTL and roll-ups allowed
        (docs/architecture.md, rules 3 and 5). Raises Incompatible naming stream and setting, or
        the server's version when it is older than 2.12.
        """

    async def append(self, entry: Entry, timeout_s: float) -> int:
        """Store one message; return its sequence."""

    def append_soon(
        self, entry: Entry, timeout_s: float, done: Callable[[int | CorefleetError], None]
    ) -> None:
        """Append as `append` does, with nobody waiting.

        `done` is called once, after this returned, with the sequence or with what `append`
        would raise.
        """

    async def append_batch(self, entries: Sequence[Entry], timeout_s: float) -> int:
        """Store all of `entries`, of one stream, or none; return the last one's sequence.

        The entries take consecutive sequences, in order. Expectations are checked
        against the state before the batch.
        """

    async def last(self, subject: str, timeout_s: float) -> Stored | None:
        """Return the newest message of `subject` as the leader knows it."""

    async def read(self, subject: str, through: int, timeout_s: float) -> list[Stored]:
        """Return the messages of `subject` up to sequence `through`, oldest first.

        `through` is the sequence of an existing message of that subject, e.g. one just
        acknowledged: replicas that lag are asked again until they have it.
        """

    async def follow(
        self,
        stream: int,
        filters: Sequence[str],
        handler: Callable[[Stored], Awaitable[None] | None],
        start: int = 1,
    ) -> Follower:
        """Deliver messages that match `filters` from sequence `start` on, then new ones."""

    async def usage(self, stream: int, timeout_s: float) -> float:
        """Return the share of the stream's max_bytes in use, 0 to 1 (0 when unlimited)."""
