"""What the daemons do alike: start, say that they are ready, end when they are told to."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import pytest
from nats.errors import ConnectionClosedError
from structlog.testing import capture_logs

from corefleet import program
from corefleet.errors import IllegalTransition, Incompatible, Unavailable
from corefleet.program import Over


async def test_a_program_says_it_is_ready_and_unwinds_when_it_is_told_to_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unwound: list[str] = []

    async def start(stack: AsyncExitStack, over: Over) -> dict[str, object]:
        stack.callback(unwound.append, "store")
        stack.callback(unwound.append, "api")
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return {"ready": "x", "listen": "127.0.0.1:1"}

    with capture_logs():
        await program.serve(start)
    assert capsys.readouterr().out == '{"ready":"x","listen":"127.0.0.1:1"}\n'
    assert unwound == ["api", "store"]


async def test_a_signal_ends_a_start_that_never_ends(capsys: pytest.CaptureFixture[str]) -> None:
    async def start(stack: AsyncExitStack, over: Over) -> dict[str, object]:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
        return {}

    with capture_logs():
        await program.serve(start)
    assert capsys.readouterr().out == ""


async def test_what_a_part_died_of_ends_the_program() -> None:
    async def start(stack: AsyncExitStack, over: Over) -> dict[str, object]:
        program.end(over, LookupError("first"))
        program.end(over, None)
        return {}

    with pytest.raises(LookupError, match="first"):
        await program.serve(start)


async def test_an_incompatible_server_is_not_tried_again() -> None:
    tries = []

    async def connect() -> None:
        tries.append(1)
        raise Incompatible("too old")

    with pytest.raises(Incompatible):
        await program.reach("NATS", connect, asyncio.get_running_loop().time() + 60)
    assert len(tries) == 1


async def test_a_server_is_tried_until_there_is_no_time_for_another_try() -> None:
    async def connect() -> None:
        raise Unavailable("nobody")

    with pytest.raises(Unavailable, match="nobody"):
        await program.reach("NATS", connect, asyncio.get_running_loop().time())


async def test_trouble_with_the_connection_passes_and_our_own_defects_do_not() -> None:
    over: Over = asyncio.get_running_loop().create_future()
    for passing in (ConnectionClosedError(), OSError("reset"), Unavailable("away")):
        program.bus_trouble(over, passing)
    assert not over.done()
    program.bus_trouble(over, IllegalTransition("task", "done", "queued", ""))
    with pytest.raises(IllegalTransition):
        await over


def test_the_last_words_are_one_line_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        program.leave("controld", program.EXIT_UNREACHABLE, Unavailable("etcd: nobody"))
    assert left.value.code == 4
    assert capsys.readouterr().err == "controld: etcd: nobody\n"
