"""Generations over a real link whose engine refuses, dies and stays away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentd.worker.engine_client import MAX_DEATHS, EngineClient, EngineGone
from corefleet.errors import InferFailed
from corefleet.link import Link, LinkServer, serve
from corefleet.messages.links import (
    CancelGenerate,
    EngineAlive,
    Generate,
    Generated,
    GenerateDone,
    GenerateFailed,
    WorkerToEngine,
)

REQUEST = Generate(call=0, session="p/s", system="", turns=())
Answer = Callable[[Link[Any], Any], None]


class Talk:
    """What a generation told its caller."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.waited: list[str] = []

    def of(self, client: EngineClient) -> Awaitable[GenerateDone]:
        return client.generate(REQUEST, self.heard.append, self.waited.append)


async def engine(path: Path, answer: Answer) -> LinkServer:
    async def handle(link: Link[Any]) -> None:
        async for batch in link:
            for message in batch:
                answer(link, message)

    return await serve(path, WorkerToEngine, handle)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[EngineClient]:
    made = EngineClient(tmp_path / "engine", patience_s=0.3)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    await asyncio.wait((running,))


async def test_text_is_heard_and_the_end_returned(client: EngineClient, tmp_path: Path) -> None:
    def answer(link: Link[Any], message: Any) -> None:
        link.send(EngineAlive(number=1))
        link.send(Generated(call=99, text="of another"))
        link.send(Generated(call=message.call, text="he"))
        link.send(Generated(call=message.call, text="llo"))
        link.send(GenerateDone(call=message.call, text="hello"))

    server = await engine(tmp_path / "engine", answer)
    talk = Talk()
    assert (await talk.of(client)).text == "hello"
    assert (talk.heard, talk.waited) == (["he", "llo"], [])
    await server.close()


async def test_a_refusal_for_now_is_asked_again(client: EngineClient, tmp_path: Path) -> None:
    calls = []

    def answer(link: Link[Any], message: Any) -> None:
        calls.append(message.call)
        if len(calls) < 3:
            link.send(GenerateFailed(call=message.call, reason="full", retry=True))
        else:
            link.send(GenerateDone(call=message.call, text="now"))

    server = await engine(tmp_path / "engine", answer)
    talk = Talk()
    assert (await talk.of(client)).text == "now"
    assert talk.waited == ["full; asks again"] * 2
    await server.close()


async def test_a_refusal_that_lasts_gives_the_task_away(
    client: EngineClient, tmp_path: Path
) -> None:
    def answer(link: Link[Any], message: Any) -> None:
        link.send(GenerateFailed(call=message.call, reason="full", retry=True))

    server = await engine(tmp_path / "engine", answer)
    with pytest.raises(EngineGone, match=r"took nothing for 0.3 s: full"):
        await Talk().of(client)
    await server.close()


async def test_a_refusal_for_good_is_the_models_failure(
    client: EngineClient, tmp_path: Path
) -> None:
    def answer(link: Link[Any], message: Any) -> None:
        link.send(GenerateFailed(call=message.call, reason="the prompt is too long"))

    server = await engine(tmp_path / "engine", answer)
    with pytest.raises(InferFailed, match="the prompt is too long"):
        await Talk().of(client)
    await server.close()


async def test_a_request_that_kills_engines_is_given_up(
    client: EngineClient, tmp_path: Path
) -> None:
    deaths = []

    def answer(link: Link[Any], message: Any) -> None:
        deaths.append(message.call)
        link.cut("killed by the request")

    server = await engine(tmp_path / "engine", answer)
    talk = Talk()
    with pytest.raises(InferFailed, match=f"the engine died {MAX_DEATHS} times"):
        await talk.of(client)
    assert len(deaths) == MAX_DEATHS
    assert talk.waited[0] == "the engine is gone; the answer begins again"
    await server.close()


async def test_no_engine_for_too_long(client: EngineClient) -> None:
    talk = Talk()
    with pytest.raises(EngineGone, match=r"no engine for 0.3 s"):
        await talk.of(client)
    assert talk.waited == ["waits for the engine"]


async def test_a_cancelled_generation_is_cancelled_at_the_engine(
    client: EngineClient, tmp_path: Path
) -> None:
    seen: asyncio.Queue[Any] = asyncio.Queue()
    server = await engine(tmp_path / "engine", lambda link, message: seen.put_nowait(message))
    generation = asyncio.ensure_future(Talk().of(client))
    request = await seen.get()
    generation.cancel()
    assert await seen.get() == CancelGenerate(call=request.call)
    await asyncio.wait((generation,))
    assert generation.cancelled()
    await server.close()
