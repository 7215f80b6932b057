"""How long a step took, and how much of this process' CPU."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from time import perf_counter_ns, thread_time_ns, time_ns
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Meter:
    """Measures from its making on; `cpu_ns` is what was added to it."""

    __slots__ = ("_began", "cpu_ns", "started_ms")

    def __init__(self) -> None:
        self.started_ms = time_ns() // 1_000_000
        self.cpu_ns = 0
        self._began = perf_counter_ns()

    @property
    def wall_us(self) -> int:
        return (perf_counter_ns() - self._began) // 1000

    @property
    def cpu_us(self) -> int:
        return self.cpu_ns // 1000


class Metered(Generic[T]):
    """Runs a coroutine while adding the CPU time of its thread to a meter.

    Only the coroutine's own time counts, not that of others while it waits. `begin` runs
    it to where it first waits; awaiting it runs the rest.
    """

    __slots__ = ("_coroutine", "_meter", "_waits_for", "result")

    def __init__(self, coroutine: Coroutine[Any, Any, T], meter: Meter) -> None:
        self._coroutine = coroutine
        self._meter = meter

    def begin(self) -> bool:
        """Whether the coroutine ended without waiting, with `result`; raises what it raised."""
        return self._leg(None)

    def __await__(self) -> Generator[Any, Any, T]:
        thrown: BaseException | None = None
        while True:
            try:
                yield self._waits_for
            except BaseException as error:  # noqa: BLE001 -- whatever it is belongs to the coroutine
                thrown = error
            if self._leg(thrown):
                return self.result
            thrown = None

    def _leg(self, thrown: BaseException | None) -> bool:
        coroutine = self._coroutine
        began = thread_time_ns()
        try:
            self._waits_for = coroutine.send(None) if thrown is None else coroutine.throw(thrown)
        except StopIteration as stop:
            self.result: T = stop.value
            return True
        finally:
            self._meter.cpu_ns += thread_time_ns() - began
        return False
