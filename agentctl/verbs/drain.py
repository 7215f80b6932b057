"""agentctl drain"""

from __future__ import annotations

import asyncio
import getpass
import re
import socket
from collections.abc import AsyncIterator

import click

from agentctl.boundary import FAILED, verb
from agentctl.durations import Duration, shown
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, say
from corefleet.errors import CorefleetError
from corefleet.rpc import fleet_pb2

PAST_DEADLINE = 4
"""The deadline has passed and attempts are still there; the drain stands."""
_AFTER_DEADLINE_MS = 15_000
"""Time to take away what is left at the deadline."""
_MOST_LINES = 20
_ALL_AGAIN_MS = 15_000
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
"""A reason in which only a number has changed is no news."""


@click.command("drain")
@click.argument("node")
@click.option("--reason", default="", help="Shown wherever the drain is, and to the tasks' users.")
@click.option(
    "--deadline",
    type=Duration(),
    default=None,
    metavar="TIME",
    help="After e.g. 10m move what is left, in the middle of a step or not. Default: never.",
)
@click.option("--wait/--no-wait", default=True, help="Return when the node is free, or at once.")
@address_option
@json_option
@verb
async def command(
    node: str,
    reason: str,
    deadline: int | None,
    wait: bool,
    addresses: tuple[str, ...],
    json_out: bool,
) -> int:
    """Free NODE of tasks: nothing new is placed there, and each task moves between two steps.

    The drain stands until `agentctl undrain`, whatever becomes of this command. Exit codes:
    0 the node is free (with --no-wait: the drain stands); 1 somebody ended the drain;
    2 no such node; 3 the fleet is not reachable; 4 the deadline has passed and tasks are
    still there; 130 interrupted.
    """
    async with connect(addresses) as client:
        drain = await client.drain_node(node, reason=reason, by=_who(), deadline_s=deadline or 0)
        if not wait:
            if json_out:
                as_json(drain)
            say(f"{node}: nothing new is placed there, tasks move at their next step boundary")
            return 0
        try:
            return await follow(client.watch_drain(node), drain, json_out)
        except (CorefleetError, asyncio.CancelledError, KeyboardInterrupt):
            say(f"the drain of {node} stands; `agentctl undrain {node}` ends it")
            raise


async def follow(
    watch: AsyncIterator[fleet_pb2.DrainProgress], drain: fleet_pb2.Drain, json_out: bool
) -> int:
    """Print how the drain goes until it is over; return the exit code."""
    report = Report(drain)
    async for progress in watch:
        if json_out:
            as_json(progress)
        else:
            for line in report.lines(progress):
                say(line)
        node, seconds = progress.node, (progress.at_ms - drain.at_ms) / 1000
        if not progress.HasField("drain"):
            say(f"{node}: the drain was ended by somebody else")
            return FAILED
        if progress.drained:
            say(f"{node} is drained, after {seconds:.1f} s")
            return 0
        due_ms = progress.drain.deadline_ms
        if due_ms and progress.at_ms > due_ms + _AFTER_DEADLINE_MS:
            say(f"{node}: the deadline has passed: {progress.waits_for}; the drain stands")
            return PAST_DEADLINE
    return FAILED


class Report:
    """Tells of a drain's progress what is new, and all that is left now and then."""

    def __init__(self, drain: fleet_pb2.Drain) -> None:
        self._drain = drain
        self._begun = False
        self._left: dict[str, str] = {}
        self._waits_for = ""
        self._told_all_ms = drain.at_ms

    def lines(self, progress: fleet_pb2.DrainProgress) -> list[str]:
        """Return the lines to print for `progress`."""
        lines = [] if self._begun else [begun_line(self._drain)]
        self._begun = True
        left = {each.task: _NUMBER.sub("", each.reason) for each in progress.left}
        gone = [f"  {task} has left" for task in self._left if task not in left]
        if progress.at_ms - self._told_all_ms >= _ALL_AGAIN_MS:
            self._told_all_ms = progress.at_ms
            self._left, self._waits_for = {}, ""
        news = [
            f"  {_attempt_line(each)}"
            for each in progress.left
            if self._left.get(each.task) != left[each.task]
        ]
        news += gone
        if len(news) > _MOST_LINES:
            news = [*news[:_MOST_LINES], f"  ... and {len(news) - _MOST_LINES} more"]
        if progress.waits_for and progress.waits_for != self._waits_for:
            seconds = (progress.at_ms - self._drain.at_ms) / 1000
            lines.append(f"{progress.node}: {progress.waits_for}, after {seconds:.1f} s")
        self._left, self._waits_for = left, progress.waits_for
        return lines + news


def begun_line(drain: fleet_pb2.Drain) -> str:
    """Return who drains a node, why and until when, as one line."""
    if not drain.by:
        turn = "waits for its turn to be drained" if drain.waits else "is drained"
        return f"{drain.node} {turn}: {drain.reason}"
    why = f": {drain.reason}" if drain.reason else ""
    line = f"{drain.node} is drained for {drain.by}{why}"
    if drain.deadline_ms:
        line += f" (deadline {shown((drain.deadline_ms - drain.at_ms) / 1000)} after its begin)"
    return line


def _attempt_line(attempt: fleet_pb2.DrainedAttempt) -> str:
    where = f"{attempt.pool}/{attempt.session}"
    return f"{attempt.task} {where}, attempt {attempt.attempt} {attempt.state}: {attempt.reason}"


def _who() -> str:
    """Return who asks, as far as this machine knows."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
