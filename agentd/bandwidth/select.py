"""Chooses the best source that works here, and says why no better one does."""

from __future__ import annotations

from collections.abc import Iterable

from agentd.bandwidth.sensor import Sensor
from corefleet.errors import Unavailable


def choose(sensors: Iterable[Sensor]) -> tuple[Sensor, tuple[str, ...]]:
    """Return the first usable sensor, ready, and one line for each before it.

    Sensors come best first; those behind the chosen one are not touched. Raises
    Unavailable with all the lines if none is usable.
    """
    why_not: list[str] = []
    for sensor in sensors:
        reason = sensor.available()
        if reason is None:
            return sensor, tuple(why_not)
        sensor.close()
        why_not.append(f"{sensor.source}: {reason}")
    raise Unavailable("no source of bandwidth figures: " + ("; ".join(why_not) or "none allowed"))
