"""The worker's side of the engine link: generations that outlive the engine's death."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from corefleet.errors import CorefleetError, CorruptRecord, InferFailed, InvalidInput, Unavailable
from corefleet.link import Link, connect
from corefleet.messages.links import (
    CancelGenerate,
    EngineAlive,
    EngineToWorker,
    Generate,
    Generated,
    GenerateDone,
    GenerateFailed,
)

PATIENCE_S = 30.0
"""How long a generation waits for an engine before the task is given back."""
MAX_DEATHS = 5
"""A request at which the engine dies so often is taken for the cause."""
_CONNECT_S = 1.0
_QUIET_S = 0.25
"""A shorter wait for the engine is nothing to tell."""
_REFUSED_PAUSE_S = 0.05
_REFUSED_PAUSE_MAX_S = 1.0

_log = structlog.get_logger(__name__)


class EngineGone(CorefleetError):
    """No engine for so long that the task had better go on elsewhere."""


class Generator(Protocol):
    """What a turn needs of an engine."""

    async def generate(
        self, request: Generate, heard: Callable[[str], None], waits: Callable[[str], None]
    ) -> GenerateDone:
        """Return the whole answer to `request`, whose `call` does not count.

        `heard` gets the text as it is generated. When the engine dies or asks to retry,
        `waits` gets the reason and the generation begins again, and so does its text.
        Raises InferFailed when there can be no answer, EngineGone after PATIENCE_S.
        """


class _Died(Exception):
    """The engine died with the request in it."""


class _NotNow(Exception):
    """The engine asks to send the request again later."""


class EngineClient:
    """Keeps one link to the engine of this domain, connecting again whenever it is lost."""

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        self._path = path
        self._patience_s = patience_s
        self._link: Link[EngineToWorker] | None = None
        self._connected = asyncio.Event()
        self._numbers = itertools.count(1)
        self._calls: dict[int, tuple[asyncio.Future[GenerateDone], Callable[[str], None]]] = {}

    async def run(self) -> None:
        """Keep the link until cancelled."""
        while True:
            try:
                link = await connect(self._path, EngineToWorker, _CONNECT_S)
            except Unavailable:
                continue
            self._link = link
            self._connected.set()
            try:
                await self._receive(link)
            finally:
                self._lost("the engine is gone")
                await link.close()

    async def generate(
        self, request: Generate, heard: Callable[[str], None], waits: Callable[[str], None]
    ) -> GenerateDone:
        """See Generator."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience_s
        pause_s = _REFUSED_PAUSE_S
        deaths = 0
        while True:
            link = self._link or await self._engine(waits)
            try:
                return await self._once(link, request, heard)
            except _Died as died:
                deaths += 1
                if deaths == MAX_DEATHS:
                    raise InferFailed(f"the engine died {deaths} times at this request") from died
                waits(f"{died}; the answer begins again")
                give_up = loop.time() + self._patience_s
            except _NotNow as later:
                if loop.time() > give_up:
                    raise EngineGone(
                        f"the engine took nothing for {self._patience_s} s: {later}"
                    ) from later
                waits(f"{later}; asks again")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _REFUSED_PAUSE_MAX_S)

    async def _engine(self, waits: Callable[[str], None]) -> Link[EngineToWorker]:
        told = asyncio.get_running_loop().call_later(_QUIET_S, waits, "waits for the engine")
        try:
            async with asyncio.timeout(self._patience_s):
                while self._link is None:
                    await self._connected.wait()
        except TimeoutError:
            raise EngineGone(f"no engine for {self._patience_s} s") from None
        finally:
            told.cancel()
        return self._link

    async def _once(
        self, link: Link[EngineToWorker], request: Generate, heard: Callable[[str], None]
    ) -> GenerateDone:
        call = next(self._numbers)
        done: asyncio.Future[GenerateDone] = asyncio.get_running_loop().create_future()
        try:
            link.send(msgspec.structs.replace(request, call=call))
        except InvalidInput as error:
            raise InferFailed(f"the request is too large: {error}") from error
        except Unavailable as error:
            raise _Died(str(error)) from error
        self._calls[call] = (done, heard)
        try:
            return await done
        except asyncio.CancelledError:
            if self._link is link and not link.closed:
                link.send(CancelGenerate(call=call))
            raise
        finally:
            self._calls.pop(call, None)

    async def _receive(self, link: Link[EngineToWorker]) -> None:
        try:
            async for batch in link:
                for message in batch:
                    self._handle(message)
        except CorruptRecord as error:
            _log.warning("Engine link is of no use; connecting again", reason=str(error))

    def _handle(self, message: EngineToWorker) -> None:
        if isinstance(message, EngineAlive):
            return
        known = self._calls.get(message.call)
        if known is None:
            return
        done, heard = known
        if isinstance(message, Generated):
            heard(message.text)
        elif done.done():
            return
        elif isinstance(message, GenerateDone):
            done.set_result(message)
        elif isinstance(message, GenerateFailed):
            failed = _NotNow if message.retry else InferFailed
            done.set_exception(failed(message.reason))

    def _lost(self, reason: str) -> None:
        self._link = None
        self._connected.clear()
        for done, _ in self._calls.values():
            if not done.done():
                done.set_exception(_Died(reason))
