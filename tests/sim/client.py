"""Simulated clients: each submits one piece of work until it is accepted, and may cancel it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from controld.intake import Accepted, Submission
from corefleet.errors import CorefleetError, Exhausted, Unavailable
from tests.sim.agent import Script
from tests.sim.controld import SimControld
from tests.sim.fleet import SimFleet
from tests.sim.loop import Process
from tests.sim.plan import Work
from tests.sim.wires import BASE_DELAY_S, MEAN_DELAY_S, drawn

T = TypeVar("T")

CALL_S = 8.0
PAUSE_S = (0.05, 0.3)


class SimClients:
    """All clients, in a process that nothing ever happens to."""

    def __init__(self, fleet: SimFleet) -> None:
        self.process = Process(fleet, "clients", "client")
        self._fleet = fleet
        self._rng = fleet.rng("clients")
        self.cut_off: dict[str, None] = {}
        """Controlds that clients do not reach."""

    def start(self, work: Work) -> None:
        """Begin to submit `work`."""
        self.process.run(self._submit(work), work.request_id)
        if work.twice:
            self.process.run(self._submit(work), f"{work.request_id} again")

    async def _submit(self, work: Work) -> None:
        script = Script(work.steps, work.step_s, work.fails, work.keeps_state)
        asked = Submission(
            work.pool,
            work.session,
            work.request_id,
            msgspec.json.encode(script),
            deadline_ms=int(work.deadline_s * 1000),
        )
        while True:
            try:
                accepted: Accepted = await self._call(
                    lambda controld: controld.parts.intake.submit(asked)  # type: ignore[union-attr]
                )
                break
            except Exhausted as error:
                await asyncio.sleep(error.retry_after_s)
            except Unavailable:
                await asyncio.sleep(drawn(self._rng, *PAUSE_S))
        self._fleet.note("accepted", work.request_id, accepted.task)
        self._fleet.properties.told_accepted(work.request_id, accepted.task)
        if work.cancel_after_s:
            await asyncio.sleep(work.cancel_after_s)
            await self._cancel(accepted.task)

    async def _cancel(self, task: str) -> None:
        while True:
            try:
                answer = await self._call(
                    lambda controld: controld.parts.calls.cancel(task, "not wanted")  # type: ignore[union-attr]
                )
                self._fleet.note("cancel", task, answer.found, answer.cancelled, answer.state)
                return
            except Unavailable:
                await asyncio.sleep(drawn(self._rng, *PAUSE_S))

    async def _call(self, work: Callable[[SimControld], Awaitable[T]]) -> T:
        """Call any controld that serves. Raises what it answers, and Unavailable."""
        serving = [each for each in self._fleet.controlds.values() if each.parts is not None]
        if not serving:
            raise Unavailable("sim: no controld serves")
        controld = serving[self._rng.randrange(len(serving))]
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if answered.done():
                return
            if error is not None:
                answered.set_exception(error)
            else:
                answered.set_result(result)  # type: ignore[arg-type]

        async def serve() -> None:
            result, failure = None, None
            try:
                if controld.parts is None:
                    raise Unavailable("sim: it ends")
                result = await work(controld)
            except CorefleetError as error:
                failure = error
            if controld.name not in self.cut_off:
                self._fleet.after(self._delay(), self.process.deliver, settle, result, failure)

        def arrive() -> None:
            if controld.process.alive and controld.name not in self.cut_off:
                controld.process.run(serve(), "call")

        self._fleet.after(self._delay(), arrive)
        try:
            async with asyncio.timeout(CALL_S):
                return await answered
        except TimeoutError:
            raise Unavailable("sim: no answer") from None

    def _delay(self) -> float:
        return BASE_DELAY_S + self._rng.expovariate(1 / MEAN_DELAY_S)
