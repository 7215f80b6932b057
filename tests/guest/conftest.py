"""Guests for tests: prepared once, restored for each module or test.

Without QEMU and mmdebstrap these tests fail and name what to install; with
COREFLEET_GUEST=skip they are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.guest.errors import MissingPrograms
from tools.guest.guest import Guest
from tools.guest.host import PACKAGES, need
from tools.guest.layout import Layout
from tools.guest.prepare import Prepared, prepared, restored
from tools.guest.steps import Steps

_HERE = Path(__file__).parent
_TEST_LIMIT_S = 120
_steps = pytest.StashKey[Steps]()


def pytest_configure(config: pytest.Config) -> None:
    def say(line: str) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        capture = config.pluginmanager.get_plugin("capturemanager")
        if reporter is not None and capture is not None:
            with capture.global_and_fixture_disabled():
                reporter.write_line(f"guest: {line}")

    config.stash[_steps] = Steps(say)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = os.environ.get("COREFLEET_GUEST") == "skip"
    for item in items:
        if _HERE in item.path.parents and "guest_programs" in getattr(item, "fixturenames", ()):
            # Making and restoring guests has limits of its own.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TEST_LIMIT_S, func_only=True))
            if skip:
                item.add_marker(pytest.mark.skip(reason="COREFLEET_GUEST=skip"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "tests/guest/" in report.nodeid:
        _test_times.append((report.duration, report.nodeid.partition("tests/guest/")[2]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = terminalreporter.config.stash[_steps].lines()
    if lines or _test_times:
        terminalreporter.section("guest: times")
        for line in lines:
            terminalreporter.write_line(line)
        for seconds, name in _test_times:
            terminalreporter.write_line(f"{seconds:6.1f} s  {name}")


_test_times: list[tuple[float, str]] = []


@pytest.fixture(scope="session")
def guest_steps(request: pytest.FixtureRequest) -> Steps:
    """Takes the times that the summary shows."""
    return request.config.stash[_steps]


@pytest.fixture(scope="session")
def guest_layout() -> Layout:
    """Four NUMA nodes of one CPU each."""
    return Layout()


@pytest.fixture(scope="session")
def guest_programs() -> None:
    """Fails where QEMU or another program that guests need is missing."""
    try:
        need(PACKAGES)
    except MissingPrograms as error:
        pytest.fail(f"{error}; or skip these tests by COREFLEET_GUEST=skip", pytrace=False)


@pytest.fixture(scope="session")
def prepared_guest(
    guest_programs: None, guest_layout: Layout, guest_steps: Steps
) -> Iterator[Prepared]:
    """A saved guest with the checkout installed; see tools.guest.prepare.restored."""
    with prepared(guest_layout, guest_steps) as ready:
        yield ready


@pytest.fixture(scope="module")
def guest(
    prepared_guest: Prepared, guest_steps: Steps, request: pytest.FixtureRequest
) -> Iterator[Guest]:
    """A fresh guest for all tests of a module: each cleans up after itself."""
    name = request.module.__name__.rpartition(".")[2].replace("_", "-")
    with restored(prepared_guest, name, steps=guest_steps) as made:
        yield made


@pytest.fixture
def fresh_guest(prepared_guest: Prepared, guest_steps: Steps) -> Iterator[Guest]:
    """A fresh guest for one test that leaves it in disorder."""
    with restored(prepared_guest, "fresh", steps=guest_steps) as made:
        yield made
