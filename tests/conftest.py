"""Fixtures of every test, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Callable, Generator

import pytest
from hypothesis import settings

from tests import leaks

settings.register_profile("corefleet", deadline=None, print_blob=True)
settings.load_profile("corefleet")

_TASK_GUARD = "leaves_no_tasks"
_before = pytest.StashKey[leaks.Baseline]()


@pytest.fixture(autouse=True)
def takes_leak_baseline(request: pytest.FixtureRequest) -> None:
    """Remembers what is there once the fixtures of modules and sessions are set up."""
    request.node.stash[_before] = leaks.baseline()


@pytest.fixture
async def leaves_no_tasks() -> AsyncIterator[None]:
    """Set up before all fixtures of an async test, so that it looks when they are gone."""
    yield
    lines = await leaks.pending_tasks(asyncio.get_running_loop())
    if lines:
        pytest.fail("leaked:\n  " + "\n  ".join(lines), pytrace=False)


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Return a function that names a free TCP port of 127.0.0.1, never the same twice.

    For servers that cannot be told to take port 0 and say which they took.
    """
    given: set[int] = set()

    def pick() -> int:
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            if port not in given:
                given.add(port)
                return port

    return pick


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            place = 1 + max(
                (i for i, name in enumerate(item.fixturenames) if name in _before_the_guard(item)),
                default=-1,
            )
            item.fixturenames.insert(place, _TASK_GUARD)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    before = item.stash.get(_before, None)
    lines = leaks.found_since(before) if before is not None else []
    if lines:
        pytest.fail(f"{item.nodeid} leaked:\n  " + "\n  ".join(lines), pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    lines = leaks.end(leaks.children())
    if lines:
        print("\nthe test run leaked:\n  " + "\n  ".join(lines))  # noqa: T201
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _before_the_guard(item: pytest.Function) -> set[str]:
    """Names of fixtures wider than a test: they outlive it."""
    definitions = item._fixtureinfo.name2fixturedefs
    return {name for name, known in definitions.items() if known[-1].scope != "function"}
