"""The event loop that every program runs on."""

from __future__ import annotations

import asyncio
import gc

import uvloop

_YOUNG, _MIDDLE, _OLD = 20_000, 20, 100
"""Objects and collections between collections (gc.set_threshold). Messages are freed by
their reference counts; with the default of 700 their rate alone triggers collections of
all that lives."""


def runner() -> asyncio.Runner:
    """Return a runner of uvloop, for a program whose modules are loaded by now."""
    calm_collector()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def calm_collector() -> None:
    """Let the collector leave alone what lives by now, and come rarely.

    What lives by now lives for good: the collector need not look at it again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
