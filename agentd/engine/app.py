"""The engine: a process bound to one domain that holds one model and generates for workers.

It listens on a Unix socket, whose file appears only when the model is loaded and has
decoded a first batch. The event loop talks to the workers; the decode thread generates.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
import uvloop

from agentd.engine.batcher import Reply
from agentd.engine.decoder import Decoder, ThreadedModel
from agentd.engine.llama import Llama
from agentd.engine.schedule import Limits, Schedule
from corefleet.clock import SystemClock
from corefleet.config import LogConfig
from corefleet.errors import CorefleetError, ModelUnusable, Unavailable
from corefleet.link import Link, serve
from corefleet.logs import configure
from corefleet.messages.links import CancelGenerate, EnginePing, Generate, WorkerToEngine

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MODEL_UNUSABLE = 3

_log = structlog.get_logger(__name__)


class Front:
    """The workers' links; hands their requests to the decoder and its replies to them."""

    def __init__(self) -> None:
        self._links: dict[int, Link[WorkerToEngine]] = {}
        self._clients = itertools.count(1)
        self.decoder: Decoder | None = None

    async def handle(self, link: Link[WorkerToEngine]) -> None:
        """Serve one worker until it is gone; what it had running is then cancelled."""
        decoder = self.decoder
        if decoder is None:
            return
        client = next(self._clients)
        self._links[client] = link
        try:
            async for batch in link:
                for message in batch:
                    match message:
                        case Generate():
                            decoder.generate(client, message)
                        case CancelGenerate(call=call):
                            decoder.cancel(client, call)
                        case EnginePing(number=number):
                            decoder.ping(client, number)
        finally:
            del self._links[client]
            decoder.forget(client)

    def deliver(self, replies: list[Reply]) -> None:
        """Send replies to those of their workers that are still there."""
        for client, message in replies:
            link = self._links.get(client)
            if link is None or link.closed:
                continue
            try:
                link.send(message)
            except Unavailable as error:
                _log.warning("Worker is gone", link=link.name, reason=str(error))


async def run(options: argparse.Namespace) -> None:
    """Load the model, serve until SIGTERM, give back what runs.

    Raises ModelUnusable, InvalidInput for impossible sizes, Conflict when another engine
    listens on the socket, and what made the decode thread fail.
    """
    started = time.monotonic()
    loop = asyncio.get_running_loop()
    # Ctrl-C in a foreground fleet reaches every process; agentd says when to stop.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    front = Front()
    decoder = Decoder(lambda: load(options), front.deliver, SystemClock())
    front.decoder = decoder
    decoder.start()
    await decoder.ready
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    stopping = loop.create_task(stop.wait())
    try:
        server = await serve(options.socket, WorkerToEngine, front.handle)
        _log.info(
            "Engine ready",
            model=options.model.name,
            socket=str(options.socket),
            domain=options.domain,
            cpus=options.cpus,
            threads=options.threads,
            seconds=round(time.monotonic() - started, 3),
        )
        try:
            await asyncio.wait((stopping, decoder.ended), return_when=asyncio.FIRST_COMPLETED)
            await decoder.stop("the engine stops")
        finally:
            await server.close()
    finally:
        stopping.cancel()
        await decoder.stop("the engine stops")
    decoder.ended.result()


def load(options: argparse.Namespace) -> tuple[ThreadedModel, Schedule]:
    """Make the model and the schedule that the options describe. In the decode thread."""
    model = Llama(
        options.model,
        threads=options.threads,
        cells=options.context,
        sequences=options.sequences,
        batch_tokens=options.batch,
        passive=options.wait == "passive",
    )
    longest = min(model.cells, model.trained_tokens)
    limits = Limits(
        sequences=options.sequences,
        cells=model.cells,
        sequence_tokens=longest,
        batch_tokens=options.batch,
        chunk_tokens=min(options.chunk, options.batch),
        queue=options.queue,
        share=model.shares_cells,
    )
    return model, Schedule(limits)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; exits with EXIT_USAGE when they are wrong."""
    parser = argparse.ArgumentParser("agentd.engine", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="GGUF file")
    parser.add_argument("--socket", required=True, type=Path, help="where to listen")
    parser.add_argument("--domain", help="shown by ps; the launcher has bound this process to it")
    parser.add_argument("--cpus", help="shown by ps")
    parser.add_argument("--threads", required=True, type=_count, help="physical cores it has")
    parser.add_argument("--context", default=16384, type=_count, help="cells of the KV cache")
    parser.add_argument("--sequences", default=16, type=_count, help="generations at once")
    parser.add_argument("--batch", default=512, type=_count, help="tokens of one decode call")
    parser.add_argument(
        "--chunk", default=256, type=_count, help="prompt tokens of one that also generates"
    )
    parser.add_argument("--queue", default=256, type=_count, help="generations that may wait")
    parser.add_argument(
        "--wait",
        default="passive",
        choices=("passive", "active"),
        help="how threads wait for each other; active only on cores that nobody else uses",
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning"))
    options = parser.parse_args(arguments)
    if options.batch <= options.sequences:
        parser.error(f"--batch {options.batch}: expected more than --sequences")
    return options


def main() -> int:
    """Run an engine; return its exit code, 3 when the model cannot be used."""
    options = parse()
    configure(LogConfig(level=options.log_level), "engine", domain=options.domain)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(options))
    except ModelUnusable as error:
        print(f"model not usable: {error}", file=sys.stderr)  # noqa: T201 -- last words
        return EXIT_MODEL_UNUSABLE
    except CorefleetError as error:
        print(error, file=sys.stderr)  # noqa: T201 -- last words
        return EXIT_FAILED
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value
