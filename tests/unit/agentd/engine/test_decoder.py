"""The decode thread, with a scripted model whose decode calls a test can hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from agentd.engine.batcher import Reply
from agentd.engine.decoder import Decoder
from agentd.engine.schedule import Schedule
from corefleet.clock import SystemClock
from corefleet.errors import ModelUnusable
from corefleet.messages.links import EngineAlive, Generated, GenerateDone, GenerateFailed
from tests.unit.agentd.engine.fakes import NO_NUMBER, ScriptedModel, ask, schedule


class Held:
    """A decoder whose model waits in its first decode call until `gate` is set."""

    def __init__(self) -> None:
        self.model = ScriptedModel({"Hi": "Hello", "bad": NO_NUMBER, "long": "x" * 1000})
        self.model.gate = self.gate = threading.Event()
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()
        self.decoder = Decoder(self.load, self.deliver, SystemClock())

    def load(self) -> tuple[ScriptedModel, Schedule]:
        return self.model, schedule()

    def deliver(self, replies: list[Reply]) -> None:
        for reply in replies:
            self.replies.put_nowait(reply)

    async def held(self) -> None:
        """Wait until a decode call is held."""
        await asyncio.to_thread(self.model.decoding.wait, 10)
        self.model.decoding.clear()

    async def result(self) -> Reply:
        async with asyncio.timeout(10):
            while True:
                client, message = await self.replies.get()
                if not isinstance(message, Generated):
                    return client, message


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    bench = Held()
    bench.decoder.start()
    await bench.decoder.ready
    yield bench
    await bench.decoder.stop("the test is over")
    assert bench.model.closed


async def test_it_generates_and_answers_pings(held: Held) -> None:
    held.gate.set()
    held.decoder.generate(3, ask(1, "Hi"))
    client, answer = await held.result()
    assert client == 3
    assert isinstance(answer, GenerateDone)
    assert answer.text == "Hello"
    held.decoder.ping(3, 9)
    client, alive = await held.result()
    assert isinstance(alive, EngineAlive)
    assert (client, alive.number, alive.running) == (3, 9, 0)
    assert alive.steps >= 6


async def test_a_ping_waits_for_the_decode_call_that_runs(held: Held) -> None:
    held.decoder.generate(3, ask(1, "Hi"))
    await held.held()
    held.decoder.ping(3, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await held.replies.get()
    held.gate.set()
    _, alive = await held.result()
    assert isinstance(alive, EngineAlive)
    assert alive.running == 1


async def test_a_cancelled_generation_does_not_wait_for_its_decode_call(held: Held) -> None:
    held.decoder.generate(3, ask(1, "Hi"))
    await held.held()
    held.decoder.cancel(3, 1)
    _, answer = await held.result()
    assert isinstance(answer, GenerateDone)
    assert (answer.finish, answer.text) == ("cancelled", "")


async def test_a_decode_call_that_others_need_goes_on(held: Held) -> None:
    held.gate.set()
    held.decoder.generate(3, ask(1, "long", max_tokens=1000))
    held.decoder.generate(4, ask(1, "long", max_tokens=1000))
    heard: set[int] = set()
    while heard != {3, 4}:
        heard.add((await held.replies.get())[0])
    held.model.decoding.clear()
    held.gate.clear()
    await held.held()
    held.decoder.cancel(3, 1)
    assert held.model.interrupts == 0
    held.decoder.cancel(4, 1)
    assert held.model.interrupts == 1
    finishes = [await held.result(), await held.result()]
    assert [client for client, _ in finishes] == [3, 4]
    assert all(isinstance(one, GenerateDone) and one.finish == "cancelled" for _, one in finishes)


async def test_a_deadline_interrupts_too(held: Held) -> None:
    held.decoder.generate(3, ask(1, "Hi", deadline_s=0.05))
    _, answer = await held.result()
    assert isinstance(answer, GenerateDone)
    assert answer.finish == "deadline"


async def test_a_client_that_is_gone_frees_the_thread(held: Held) -> None:
    held.decoder.generate(3, ask(1, "Hi", deadline_s=60.0))
    await held.held()
    held.decoder.forget(3)
    held.decoder.ping(4, 1)
    client, alive = await held.result()
    assert client == 4
    assert isinstance(alive, EngineAlive)
    assert alive.running == 0


async def test_stopping_gives_back_what_runs(held: Held) -> None:
    held.decoder.generate(3, ask(1, "Hi"))
    held.decoder.generate(4, ask(1, "Hi"))
    await held.held()
    await held.decoder.stop("the engine stops")
    for client in (3, 4):
        got, failed = await held.result()
        assert got == client
        assert isinstance(failed, GenerateFailed)
        assert (failed.retry, failed.reason) == (True, "the engine stops")


async def test_a_model_that_turns_out_damaged_ends_the_thread(held: Held) -> None:
    held.gate.set()
    held.decoder.generate(3, ask(1, "bad"))
    with pytest.raises(ModelUnusable):
        await held.decoder.ended
    assert held.model.closed


async def test_a_model_that_does_not_load_is_told(held: Held) -> None:
    def load() -> tuple[ScriptedModel, Schedule]:
        raise ModelUnusable("no such file")

    decoder = Decoder(load, held.deliver, SystemClock())
    decoder.start()
    with pytest.raises(ModelUnusable, match="no such file"):
        await decoder.ready
    await decoder.stop("it never ran")
