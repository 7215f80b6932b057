"""What `agentctl drain` prints of a drain's progress, and the exit codes that it documents."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner

from agentctl.boundary import FAILED
from agentctl.durations import shown
from agentctl.main import main
from agentctl.verbs.drain import PAST_DEADLINE, Report, begun_line, follow
from corefleet.rpc import fleet_pb2

BEGAN_MS = 1_700_000_000_000
DRAIN = fleet_pb2.Drain(node="n1", reason="new memory", by="ada@desk", at_ms=BEGAN_MS)
NO_DRAIN = fleet_pb2.DrainProgress(node="n1", at_ms=BEGAN_MS + 2000)


def attempt(task: str, reason: str = "in a step") -> fleet_pb2.DrainedAttempt:
    return fleet_pb2.DrainedAttempt(
        task=task, pool="p", session="s", state="placed", attempt=1, reason=reason
    )


def progress(
    after_ms: int, *left: fleet_pb2.DrainedAttempt, drain: fleet_pb2.Drain = DRAIN
) -> fleet_pb2.DrainProgress:
    return fleet_pb2.DrainProgress(
        node="n1",
        drain=drain,
        at_ms=BEGAN_MS + after_ms,
        left=left,
        drained=not left,
        waits_for=f"{len(left)} attempts are left" if left else "",
    )


async def told(*items: fleet_pb2.DrainProgress) -> AsyncIterator[fleet_pb2.DrainProgress]:
    for item in items:
        yield item


def test_only_news_is_told() -> None:
    report = Report(DRAIN)
    assert report.lines(progress(100, attempt("t1"), attempt("t2"))) == [
        "n1 is drained for ada@desk: new memory",
        "n1: 2 attempts are left, after 0.1 s",
        "  t1 p/s, attempt 1 placed: in a step",
        "  t2 p/s, attempt 1 placed: in a step",
    ]
    assert report.lines(progress(600, attempt("t1"), attempt("t2"))) == []
    assert report.lines(progress(1100, attempt("t2", "leaves n1"))) == [
        "n1: 1 attempts are left, after 1.1 s",
        "  t2 p/s, attempt 1 placed: leaves n1",
        "  t1 has left",
    ]


def test_a_time_in_a_reason_is_no_news_but_now_and_then_all_is_told_again() -> None:
    report = Report(DRAIN)
    report.lines(progress(100, attempt("t1", "asked 0.1 s ago to yield")))
    assert report.lines(progress(9600, attempt("t1", "asked 9.6 s ago to yield"))) == []
    again = report.lines(progress(15_600, attempt("t1", "asked 15.6 s ago to yield")))
    assert again == [
        "n1: 1 attempts are left, after 15.6 s",
        "  t1 p/s, attempt 1 placed: asked 15.6 s ago to yield",
    ]
    assert report.lines(progress(16_100, attempt("t1", "asked 16.1 s ago to yield"))) == []


def test_a_node_with_many_tasks_does_not_flood_the_terminal() -> None:
    lines = Report(DRAIN).lines(progress(100, *(attempt(f"t{i}") for i in range(300))))
    assert len(lines) == 23
    assert lines[-1] == "  ... and 280 more"


def test_the_first_line_says_who_why_and_until_when() -> None:
    deadline = fleet_pb2.Drain(
        node="n1", by="ada", at_ms=BEGAN_MS, deadline_ms=BEGAN_MS + 5_400_000
    )
    assert begun_line(deadline) == "n1 is drained for ada (deadline 1h30m after its begin)"
    asks = fleet_pb2.Drain(node="n1", reason="heat", waits=True)
    assert begun_line(asks) == "n1 waits for its turn to be drained: heat"
    asks.waits = False
    assert begun_line(asks) == "n1 is drained: heat"


async def test_the_exit_code_says_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    due = fleet_pb2.Drain(node="n1", by="ada", at_ms=BEGAN_MS, deadline_ms=BEGAN_MS + 1000)
    stuck = attempt("t1")
    assert await follow(told(progress(1, stuck), progress(900)), DRAIN, False) == 0
    assert "drained, after 0.9 s" in capsys.readouterr().err
    assert await follow(told(progress(1, stuck), NO_DRAIN), DRAIN, False) == FAILED == 1
    late = (progress(15_900, stuck, drain=due), progress(16_100, stuck, drain=due))
    assert await follow(told(*late), due, False) == PAST_DEADLINE == 4
    assert "1 attempts are left; the drain stands" in capsys.readouterr().err
    assert await follow(told(late[0], progress(15_950, drain=due)), due, False) == 0


async def test_json_is_one_document_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    await follow(told(progress(1, attempt("t1")), progress(900)), DRAIN, True)
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2
    assert '"drained": true' in out[1]


@pytest.mark.parametrize("text", ["", "0", "soon", "10x", "-5", "5m10h"])
def test_a_deadline_that_is_none_is_refused_with_an_example(text: str) -> None:
    ran = CliRunner().invoke(main, ["drain", "n1", f"--deadline={text}"])
    assert ran.exit_code == 2
    assert "1h30m" in ran.output


def test_times_are_shown_as_they_are_typed() -> None:
    assert [shown(s) for s in (0, 59, 60, 5400, 90_061)] == ["0s", "59s", "1m", "1h30m", "1d1h1m1s"]
