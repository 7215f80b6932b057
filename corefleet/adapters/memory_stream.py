"""A stream in memory that decides as JetStream does. No I/O and no event loop in here."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from corefleet.bus import Entry, Stored
from corefleet.errors import Fenced, StoreFull

_MESSAGE_OVERHEAD = 32


class MemoryStream:
    """Messages by sequence, and by subject. `now` gives monotonic seconds for time to live."""

    def __init__(self, name: str, now: Callable[[], float], max_bytes: int = -1) -> None:
        self.name = name
        self.max_bytes = max_bytes
        self.last_sequence = 0
        self._now = now
        self._messages: dict[int, Stored] = {}
        self._expiries: list[tuple[float, int]] = []
        self._by_subject: dict[str, list[int]] = {}
        self._by_last_token: dict[str, dict[str, None]] = {}
        self._bytes = 0
        self._watchers: list[Callable[[], None]] = []

    def append(self, entries: Sequence[Entry]) -> int:
        """Store all of `entries` or none; return the last one's sequence.

        Raises Fenced, also for an expectation on a subject that an earlier entry of the
        same call writes, and StoreFull.
        """
        self._expire()
        self._check(entries)
        for entry in entries:
            self._store(entry)
        for watcher in list(self._watchers):
            watcher()
        return self.last_sequence

    def last(self, subject: str) -> Stored | None:
        """Return the newest message of `subject`."""
        self._expire()
        sequences = self._by_subject.get(subject)
        return self._messages[sequences[-1]] if sequences else None

    def of(self, subject: str) -> list[Stored]:
        """Return all messages of `subject`, oldest first."""
        self._expire()
        return [self._messages[sequence] for sequence in self._by_subject.get(subject, ())]

    def since(self, sequence: int) -> list[Stored]:
        """Return all messages from `sequence` on, oldest first."""
        self._expire()
        wanted = range(sequence, self.last_sequence + 1)
        return [self._messages[number] for number in wanted if number in self._messages]

    def usage(self) -> float:
        """Return the share of `max_bytes` in use."""
        self._expire()
        return min(1.0, self._bytes / self.max_bytes) if self.max_bytes > 0 else 0.0

    def watch(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call `watcher` after every append; return how to stop that."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def _check(self, entries: Sequence[Entry]) -> None:
        written: set[str] = set()
        size = self._bytes
        for entry in entries:
            if entry.fence_sequence is not None:
                subject = entry.fence_subject or entry.subject
                fenced = self._meant_by(subject)
                found = max((self._by_subject[each][-1] for each in fenced), default=0)
                mine = subject in written or not written.isdisjoint(fenced)
                if mine or found != entry.fence_sequence:
                    raise Fenced(
                        f"{entry.subject}: last sequence of {subject} is {found}, "
                        f"not {entry.fence_sequence}"
                    )
            written.add(entry.subject)
            size += _size(entry.subject, entry.payload)
        if 0 < self.max_bytes < size:
            raise StoreFull(f"stream {self.name}: {size} bytes; maximum {self.max_bytes}")

    def _meant_by(self, subject: str) -> list[str]:
        """Return the subjects with messages that a subject, perhaps with `*`, stands for."""
        tokens = subject.split(".")
        if "*" not in tokens:
            return [subject] if subject in self._by_subject else []
        alike = self._by_last_token.get(tokens[-1], ())
        return [each for each in alike if subject_matches(tokens, each)]

    def _store(self, entry: Entry) -> None:
        if entry.rollup:
            for sequence in list(self._by_subject.get(entry.subject, ())):
                self._drop(sequence)
        self.last_sequence += 1
        sequence = self.last_sequence
        self._messages[sequence] = Stored(entry.subject, entry.payload, sequence)
        if entry.subject not in self._by_subject:
            self._by_subject[entry.subject] = []
            last = entry.subject.rpartition(".")[2]
            self._by_last_token.setdefault(last, {})[entry.subject] = None
        self._by_subject[entry.subject].append(sequence)
        self._bytes += _size(entry.subject, entry.payload)
        if entry.ttl_s:
            heapq.heappush(self._expiries, (self._now() + entry.ttl_s, sequence))

    def _expire(self) -> None:
        now = self._now()
        while self._expiries and self._expiries[0][0] <= now:
            _, sequence = heapq.heappop(self._expiries)
            if sequence in self._messages:
                self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        message = self._messages.pop(sequence)
        sequences = self._by_subject[message.subject]
        sequences.remove(sequence)
        if not sequences:
            del self._by_subject[message.subject]
            last = message.subject.rpartition(".")[2]
            del self._by_last_token[last][message.subject]
            if not self._by_last_token[last]:
                del self._by_last_token[last]
        self._bytes -= _size(message.subject, message.payload)


def subject_matches(pattern: Sequence[str], subject: str) -> bool:
    """Whether `subject` is one that the tokens of `pattern` mean, `*` and `>` included."""
    tokens = subject.split(".")
    for number, wanted in enumerate(pattern):
        if wanted == ">":
            return len(tokens) > number
        if number >= len(tokens) or wanted not in ("*", tokens[number]):
            return False
    return len(tokens) == len(pattern)


def _size(subject: str, payload: bytes) -> int:
    return len(subject) + len(payload) + _MESSAGE_OVERHEAD
