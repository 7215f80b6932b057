"""Counters that count what a test says."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentd.bandwidth.events import Event
from agentd.bandwidth.perf import Reading
from corefleet.errors import Unavailable

SECOND_NS = 1_000_000_000


@dataclass
class FakeCounters:
    """Each open counter starts at nothing. `refuse`: parts of event names that do not open."""

    refuse: tuple[str, ...] = ()
    opened: dict[int, tuple[Event, int, str | None]] = field(default_factory=dict)
    """By handle; those that are still open."""
    readings: dict[int, Reading] = field(default_factory=dict)
    gone: bool = False

    def open(self, event: Event, cpu: int, group: str | None = None) -> int:
        if any(part in event.name for part in self.refuse):
            raise Unavailable(f"{event.name} on CPU {cpu}: EACCES: not allowed")
        handle = len(self.readings) + 100
        self.opened[handle] = (event, cpu, group)
        self.readings[handle] = Reading(0, 0, 0)
        return handle

    def read(self, handle: int) -> Reading:
        assert handle in self.opened
        if self.gone:
            raise Unavailable("a counter is gone")
        return self.readings[handle]

    def close(self, handle: int) -> None:
        del self.opened[handle]

    def count(
        self,
        name: str,
        value: int,
        cpu: int | None = None,
        group: str | None = None,
        running_ns: int = SECOND_NS,
    ) -> None:
        """Let a second pass in which each open counter of that name counts `value`."""
        found = 0
        for handle, (event, where, whose) in self.opened.items():
            if event.name == name and cpu in (None, where) and group in (None, whose):
                old = self.readings[handle]
                self.readings[handle] = Reading(
                    old.value + value, old.enabled_ns + SECOND_NS, old.running_ns + running_ns
                )
                found += 1
        assert found, f"{name} is not counted"
