"""What a session keeps between tasks: memory and the latest messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from corefleet.codec import encode
from corefleet.errors import InvalidInput
from corefleet.messages.records import Turn

MAX_MEMORY_BYTES = 256 * 1024
"""Keys and values of a session together."""
MAX_HISTORY_BYTES = 128 * 1024
"""Text of a session's messages; older ones make room."""


class Memory:
    """A session's values: those committed, and over them those of the running task."""

    def __init__(self, committed: Mapping[str, bytes]) -> None:
        self._committed = committed
        self._written: dict[str, bytes] = {}
        self._bytes = sum(len(key) + len(data) for key, data in committed.items())

    @property
    def changed(self) -> bool:
        """Whether the task wrote anything."""
        return bool(self._written)

    def read(self, key: str) -> bytes | None:
        """Return the value of `key`, the task's own first; None if there is none."""
        data = self._written.get(key)
        return self._committed.get(key) if data is None else data

    def check(self, key: str, data: bytes) -> None:
        """Raise InvalidInput if the session would grow too large by this write."""
        size = self._bytes + self._growth(key, data)
        if size > MAX_MEMORY_BYTES:
            raise InvalidInput(
                f"remember({key!r})", f"{size} bytes", f"at most {MAX_MEMORY_BYTES} in a session"
            )

    def write(self, key: str, data: bytes) -> None:
        """Set `key` to `data` for the rest of the task."""
        self._bytes += self._growth(key, data)
        self._written[key] = data

    def merged(self) -> dict[str, bytes]:
        """Return all values, as they are to be committed."""
        return {**self._committed, **self._written}

    def _growth(self, key: str, data: bytes) -> int:
        old = self.read(key)
        return len(data) + len(key) if old is None else len(data) - len(old)


def window(history: Sequence[Turn], new: Sequence[Turn], count: int) -> tuple[Turn, ...]:
    """Return the last `count` messages of both, fewer if their text is too long.

    None of them is the rest of a tool's call whose beginning is cut off.
    """
    kept: list[Turn] = []
    size = 0
    for message in reversed((*history, *new)):
        size += len(message.text.encode())
        if len(kept) == count or size > MAX_HISTORY_BYTES:
            break
        kept.append(message)
    while kept and (kept[-1].role == "tool" or kept[-1].name):
        kept.pop()
    return tuple(reversed(kept))


def pack(value: Any, what: str = "value") -> bytes:
    """Return `value` as MessagePack; raises InvalidInput naming `what`."""
    try:
        return encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidInput(what, type(value).__name__, f"what MessagePack has ({error})") from error
