"""Log lines carry their fields in every format."""

from __future__ import annotations

import logging
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import structlog

from corefleet import logs
from corefleet.config import LogConfig

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def restores_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


def test_the_console_shows_event_and_fields(capsys: Capture) -> None:
    logs.configure(LogConfig(format="console"), "agentd", node="n1")

    structlog.get_logger("a").info("A worker started", pool="support", domain=1)

    line = capsys.readouterr().err
    assert re.match(r"\d\d:\d\d:\d\d\.\d+ ", line)
    for part in ("A worker started", "node=n1", "pool=support", "domain=1", "program=agentd"):
        assert part in line
    assert "\x1b" not in line


def test_json_is_one_object_a_line(capsys: Capture) -> None:
    logs.configure(LogConfig(format="json"), "controld")

    structlog.get_logger("a").warning("A task was requeued", task="3f-0", odd=object)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger("a").exception("It failed")

    first, second = (msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines())
    assert (first["event"], first["level"]) == ("A task was requeued", "warning")
    assert (first["task"], first["program"]) == ("3f-0", "controld")
    assert first["timestamp"].endswith("Z")
    assert "ValueError: broken" in second["exception"]


def test_levels_below_the_configured_one_say_nothing(capsys: Capture) -> None:
    logs.configure(LogConfig(format="json", level="warning"), "controld")

    structlog.get_logger("a").info("not shown")

    assert capsys.readouterr().err == ""


def test_libraries_log_through_the_same_lines(capsys: Capture) -> None:
    logs.configure(LogConfig(format="json"), "controld")

    logging.getLogger("nats").error("lost %s", "connection")
    logging.getLogger("nats").info("chatter")

    (line,) = capsys.readouterr().err.splitlines()
    read = msgspec.json.decode(line)
    assert (read["event"], read["level"], read["logger"]) == ("lost connection", "error", "nats")


def test_configuring_twice_does_not_double_lines(capsys: Capture) -> None:
    for _ in range(2):
        logs.configure(LogConfig(format="json"), "controld")

    logging.getLogger("nats").error("once")

    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_journal_gets_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[dict[str, Any]] = []
    journal = types.SimpleNamespace(send=lambda **entry: entries.append(entry))
    monkeypatch.setitem(sys.modules, "cysystemd", types.SimpleNamespace(journal=journal))
    logs.configure(LogConfig(format="journal"), "agentd", node="n1")

    structlog.get_logger("a").error("A worker died", pool="support", domain=1, task="3f-0")

    assert entries == [
        {
            "MESSAGE": "A worker died  pool=support domain=1 task=3f-0 node=n1",
            "PRIORITY": 3,
            "SYSLOG_IDENTIFIER": "agentd",
            "COREFLEET_PROGRAM": "agentd",
            "NODE": "n1",
            "POOL": "support",
            "DOMAIN": "1",
            "TASK": "3f-0",
        }
    ]


def test_without_cysystemd_lines_carry_their_priority(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "cysystemd", None)
    logs.configure(LogConfig(format="journal"), "agentd", node="n1")

    structlog.get_logger("a").warning("A worker died", pool="support")
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger("a").exception("It failed")

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("<4>A worker died  ")
    assert "pool=support" in lines[0]
    assert all(line.startswith("<3>") for line in lines[1:])
    assert lines[-1] == "<3>ValueError: broken"


@pytest.mark.parametrize(("journal", "expected"), [(True, "<6>Hello"), (False, "Hello")])
def test_auto_asks_whether_stderr_is_the_journal(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, journal: bool, expected: str
) -> None:
    monkeypatch.setitem(sys.modules, "cysystemd", None)
    monkeypatch.setattr(logs, "under_journal", lambda: journal)
    logs.configure(LogConfig(), "agentd")

    structlog.get_logger("a").info("Hello")

    line = capsys.readouterr().err
    assert expected in line
    assert line.startswith("<6>") == journal


def test_the_audit_log_is_found_by_its_field_and_no_level_silences_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries: list[dict[str, Any]] = []
    journal = types.SimpleNamespace(send=lambda **entry: entries.append(entry))
    monkeypatch.setitem(sys.modules, "cysystemd", types.SimpleNamespace(journal=journal))
    logs.configure(LogConfig(format="journal", level="error"), "controld", controld="c1")

    logs.audit("Cancel", who="client/a", task="3f-0", result="OK")
    structlog.get_logger("a").info("not shown")

    assert entries == [
        {
            "MESSAGE": "Cancel  audit=1 who=client/a task=3f-0 result=OK controld=c1",
            "PRIORITY": 6,
            "SYSLOG_IDENTIFIER": "corefleet.audit",
            "AUDIT": "1",
            "TASK": "3f-0",
            "COREFLEET_WHO": "client/a",
            "COREFLEET_RESULT": "OK",
            "COREFLEET_PROGRAM": "controld",
            "COREFLEET_CONTROLD": "c1",
        }
    ]
