"""resctrl's monitoring as a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from agentd.bandwidth.report import Source
from agentd.bandwidth.sensor import Load
from corefleet.errors import CorefleetError


class Monitor(Protocol):
    """What reads the counters: by domain, bytes per second of all and of the batch class."""

    def sample(self, now: float) -> Mapping[int, tuple[float, float | None]] | None: ...


class ResctrlSensor:
    """`open_monitor` returns a monitor, or the line that says why there is none."""

    def __init__(self, open_monitor: Callable[[], Monitor | str]) -> None:
        self._open_monitor = open_monitor
        self._monitor: Monitor | None = None

    @property
    def source(self) -> Source:
        return "resctrl"

    def available(self) -> str | None:
        try:
            found = self._open_monitor()
        except CorefleetError as error:
            return str(error)
        if isinstance(found, str):
            return found.removeprefix("resctrl monitoring: ")
        self._monitor = found
        return None

    def sample(self, now: float) -> Mapping[int, Load]:
        traffic = self._monitor.sample(now) if self._monitor is not None else None
        return {
            domain: Load(bytes_per_s=total, batch_bytes_per_s=batch)
            for domain, (total, batch) in (traffic or {}).items()
        }

    def close(self) -> None:
        self._monitor = None
