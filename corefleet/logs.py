"""Log set-up: journal fields under systemd, a readable console or JSON elsewhere.

Programs call `configure` once, first thing; everybody else uses
`structlog.get_logger(__name__)`. The fields `node`, `pool`, `domain` and `task` mean the
same everywhere; bind them with `structlog.contextvars` or on the logger.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, Literal, TextIO

import msgspec
import structlog

from corefleet.config import LogConfig, under_journal

Format = Literal["console", "json", "journal"]

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_SHARED = frozenset({"node", "pool", "domain", "task", "audit"})
"""Fields that units carry as well (LogExtraFields), so that one match finds all of a node's;
and AUDIT=1, which finds the audit log."""
_AUDIT = "corefleet.audit"
_audit_log = structlog.wrap_logger(
    None,
    wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
    cache_logger_on_first_use=False,
    audit=1,
)
_RENDERED = frozenset({"event", "level", "logger", "exception", "timestamp"})

Event = MutableMapping[str, Any]


def configure(config: LogConfig, program: str, **fields: object) -> None:
    """Set up structlog and the logging of libraries for this process.

    `fields`, e.g. node="n1", are on every line. Lines go to stderr.
    """
    chosen: Format = (
        ("journal" if under_journal() else "console") if config.format == "auto" else config.format
    )
    level = _LEVELS[config.level]
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(program=program, **fields)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            *_rendering(chosen, sys.stderr),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_factory(chosen, sys.stderr),
        cache_logger_on_first_use=True,
    )
    _adopt_library_logs(level)


def audit(event: str, **fields: object) -> None:
    """Write a line of the audit log: it has AUDIT=1, and no level silences it."""
    _audit_log.info(event, logger=_AUDIT, **fields)


def _rendering(chosen: Format, stream: TextIO) -> list[structlog.typing.Processor]:
    timestamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    match chosen:
        case "console":
            return [
                structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
                structlog.dev.ConsoleRenderer(colors=stream.isatty()),
            ]
        case "json":
            return [
                timestamp,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(serializer=_json),
            ]
        case "journal":
            return [structlog.processors.format_exc_info, _for_journal]


def _factory(chosen: Format, stream: TextIO) -> Callable[..., Any]:
    if chosen == "journal":
        send = _journal_sender(stream)
        return lambda *_: _JournalLogger(send)
    return structlog.PrintLoggerFactory(stream)


def _json(event: Event, **_: object) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


def _for_journal(_: object, method: str, event: Event) -> Event:
    """Turn an event into the fields of a journal entry."""
    message = str(event.get("event", ""))
    said = " ".join(
        f"{key}={value}"
        for key, value in event.items()
        if key not in _RENDERED and key != "program"
    )
    lines = [f"{message}  {said}".rstrip(), str(event.get("exception", ""))]
    entry: Event = {
        key.upper() if key in _SHARED else f"COREFLEET_{key.upper()}": str(value)
        for key, value in event.items()
        if key not in _RENDERED and key.isidentifier()
    }
    entry["MESSAGE"] = "\n".join(line for line in lines if line)
    entry["PRIORITY"] = _PRIORITIES.get(str(event.get("level", method)), 6)
    audits = event.get("logger") == _AUDIT
    entry["SYSLOG_IDENTIFIER"] = _AUDIT if audits else str(event.get("program", "corefleet"))
    return entry


def _journal_sender(stream: TextIO) -> Callable[..., None]:
    """Return what sends an entry: the journal's own protocol, or its prefixes on stderr."""
    try:
        from cysystemd import journal
    except ImportError:
        return lambda **entry: _prefixed(stream, entry)
    return lambda **entry: journal.send(**entry)


def _prefixed(stream: TextIO, entry: Event) -> None:
    """Write an entry as sd-daemon(3) reads it: each line with its priority in front."""
    for line in str(entry["MESSAGE"]).splitlines() or [""]:
        stream.write(f"<{entry['PRIORITY']}>{line}\n")
    stream.flush()


class _JournalLogger:
    """Takes what `_for_journal` made, under every name of a log method."""

    def __init__(self, send: Callable[..., None]) -> None:
        self.msg = send
        self.debug = self.info = self.warning = self.error = self.critical = send
        self.exception = self.log = send


class _ToStructlog(logging.Handler):
    """Hands the records of libraries to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            log = structlog.get_logger(record.name)
            level = min(
                max(record.levelno, logging.DEBUG) // 10 * 10,
                logging.CRITICAL,
            )
            log.log(level, record.getMessage(), logger=record.name, exc_info=record.exc_info)
        except Exception:  # noqa: BLE001 - a log line that fails must not fail its caller
            self.handleError(record)


def _adopt_library_logs(level: int) -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _ToStructlog):
            root.removeHandler(handler)
    root.addHandler(_ToStructlog())
    root.setLevel(max(level, logging.WARNING))
