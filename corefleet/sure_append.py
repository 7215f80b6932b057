"""Appends whose fate is found out: an unclear answer is resolved by reading, never guessed.

docs/architecture.md, rule 2: a refused append may be our own, committed with its answer
lost; a timeout says nothing at all.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from corefleet.bus import Entry, Log
from corefleet.errors import CorefleetError, Fenced, StoreFull, Unavailable

T = TypeVar("T")


def loop_time() -> float:
    """Return the running loop's monotonic seconds."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True, frozen=True)
class Patience:
    """How long to wait, in seconds; clock and sleep are here for tests to replace."""

    call_s: float = 2.0
    """Deadline of one append or read."""
    give_up_s: float = 30.0
    """After so long without a clear answer the last error is raised."""
    first_delay_s: float = 0.02
    longest_delay_s: float = 1.0
    now: Callable[[], float] = loop_time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class BackOff:
    """Growing, jittered waits until patience is at its end."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._give_up = patience.now() + patience.give_up_s
        self._delay = patience.first_delay_s

    async def after(self, error: Exception) -> None:
        """Wait, longer each time; raises `error` when patience is at its end."""
        if self._patience.now() >= self._give_up:
            raise error
        await self._patience.sleep(self._delay * random.uniform(0.5, 1.0))
        self._delay = min(self._delay * 2, self._patience.longest_delay_s)


async def append_surely(
    log: Log,
    entry: Entry,
    resolve: Callable[[], Awaitable[int | None]],
    patience: Patience,
    wait_for_room: bool = True,
    first: CorefleetError | None = None,
) -> int:
    """Append `entry`, and the identical one again if need be; return its sequence.

    `first` is what an append of it came to that is over already.

    After an unclear answer `resolve` reads from the stream's leader and returns the
    sequence if the entry (or what stands for it) is there, None if it is not and may
    still be appended, and raises what ends the matter otherwise. Raises the last
    Unavailable or Fenced when patience is at its end, and without `wait_for_room`
    StoreFull at once when the first answer says so: then nothing was stored.
    """
    try:
        if first is not None:
            raise first
        return await log.append(entry, patience.call_s)
    except (Fenced, Unavailable) as error:
        if isinstance(error, StoreFull) and not wait_for_room:
            raise
        unclear: Exception = error
    back_off = BackOff(patience)
    while True:
        try:
            found = await resolve()
        except Unavailable as error:
            await back_off.after(error)
            continue
        if found is not None:
            return found
        await back_off.after(unclear)
        try:
            return await log.append(entry, patience.call_s)
        except (Fenced, Unavailable) as error:
            unclear = error


async def read_surely(read: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """Return what `read` returns, asking again while the log is unavailable."""
    back_off: BackOff | None = None
    while True:
        try:
            return await read()
        except Unavailable as error:
            back_off = back_off or BackOff(patience)
            await back_off.after(error)
