"""Work that runs beside everything else, and whose failure must not go unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """Holds running tasks; tells `failed` of the first error that one of them dies of."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str = "") -> asyncio.Task[None]:
        """Run `work` until it ends, is cancelled, or `close`."""
        task = asyncio.create_task(work, name=name or None)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel what still runs and wait for its end. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drained(self) -> None:
        """Return when nothing runs any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)


async def stop(task: asyncio.Task[Any] | None) -> None:
    """Cancel `task` and wait for its end; its errors have been told to its Background."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
