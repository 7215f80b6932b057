"""What agentctl prints, and what its exit codes say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentctl import boundary, options, output
from agentctl.main import VERBS, main
from corefleet import errors
from corefleet.rpc import tasks_pb2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidInput("pool", "x", "a pool"), 2),
        (errors.ConfigError("f: `k`: wrong"), 2),
        (errors.NotFound("no such task"), 2),
        (errors.Conflict("it has ended"), 2),
        (errors.Unavailable("nobody answers"), 3),
        (errors.Timeout("late"), 3),
        (errors.Exhausted("too much", 1.0), 3),
        (errors.Unauthenticated("no token"), 5),
        (errors.PermissionDenied("client/a may not drain"), 5),
        (errors.ModelUnusable("broken"), 1),
    ],
)
def test_every_error_has_its_documented_exit_code(error: errors.CorefleetError, code: int) -> None:
    assert boundary.exit_code(error) == code


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_imports(verb: str) -> None:
    ran = CliRunner().invoke(main, [verb, "--help"])
    assert ran.exit_code == 0, ran.output
    assert "Usage:" in ran.output


def test_an_unknown_verb_is_a_usage_error() -> None:
    assert CliRunner().invoke(main, ["fly"]).exit_code == 2


def test_states_are_words() -> None:
    assert output.state_name(tasks_pb2.TASK_STATE_QUEUED) == "queued"
    for word, number in output.STATE_NUMBERS.items():
        if word:
            assert output.state_name(number) == word


def test_a_task_is_json_with_its_state_as_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    output.as_json(tasks_pb2.Task(task="3-x", state=tasks_pb2.TASK_STATE_DONE, output="é"))
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["output"], shown["attempt"]) == ("done", "é", 0)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            tasks_pb2.TaskEvent(waiting=tasks_pb2.Waiting(reason="no node offers pool x")),
            "waits: no node offers pool x",
        ),
        (
            tasks_pb2.TaskEvent(
                placed=tasks_pb2.Placed(node="n1", domain=1, attempt=2, why="home")
            ),
            "placed on n1, domain 1, attempt 2: home",
        ),
        (
            tasks_pb2.TaskEvent(
                step=tasks_pb2.Step(
                    step=3, kind="tool", name="clock", node="n1", wall_us=250_000, summary="12:00"
                )
            ),
            "step 3 tool clock on n1 (0.25 s)  12:00",
        ),
        (
            tasks_pb2.TaskEvent(
                finished=tasks_pb2.Task(
                    state=tasks_pb2.TASK_STATE_FAILED,
                    node="n2",
                    attempt=2,
                    created_ms=1000,
                    finished_ms=2500,
                    failure=tasks_pb2.Failure(code="agent_error", message="KeyError"),
                )
            ),
            "failed on n2 after 1.50 s, 2 attempts: agent_error: KeyError",
        ),
        (tasks_pb2.TaskEvent(token=tasks_pb2.Token(text="a")), ""),
    ],
)
def test_events_are_one_line_for_people(event: tasks_pb2.TaskEvent, line: str) -> None:
    assert output.event_line(event) == line


def test_input_must_be_utf8_text_from_one_place(tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_bytes(b"caf\xe9")
    with pytest.raises(errors.InvalidInput, match="byte 3"):
        options.read_input(None, file)
    with pytest.raises(errors.InvalidInput, match="not both"):
        options.read_input("x", file)
    with pytest.raises(errors.InvalidInput, match="--file"):
        options.read_input(None, tmp_path / "none")
    assert options.read_input("né", None) == "né".encode()
