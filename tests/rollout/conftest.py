"""Bare guests and the archive that they are installed from; times in the summary.

They run by `make test-rollout`, which sets COREFLEET_ROLLOUT, and are skipped otherwise and with
COREFLEET_GUEST=skip.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.fleet import Rollout, mirror
from tests.rollout.machines import bare_state
from tools import package
from tools.guest.errors import MissingPrograms
from tools.guest.host import PACKAGES, need
from tools.guest.image import Image
from tools.guest.steps import Steps

_HERE = Path(__file__).parent
_TEST_LIMIT_S = 5400
_steps = Steps()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents and "bare" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(_TEST_LIMIT_S))
            if os.environ.get("COREFLEET_GUEST") == "skip":
                item.add_marker(pytest.mark.skip(reason="COREFLEET_GUEST=skip"))
            elif "COREFLEET_ROLLOUT" not in os.environ:
                item.add_marker(pytest.mark.skip(reason="only by make test-rollout"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _steps.taken:
        terminalreporter.section("rollout: times")
        for line in _steps.lines():
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def rollout_steps() -> Steps:
    """Takes the times that the summary shows."""
    return _steps


@pytest.fixture(scope="session")
def bare(rollout_steps: Steps) -> Iterator[tuple[Image, Path]]:
    """The image and the saved state of a machine with nothing of the project."""
    try:
        need(PACKAGES)
    except MissingPrograms as error:
        pytest.fail(f"{error}; or skip these tests by COREFLEET_GUEST=skip", pytrace=False)
    with bare_state(rollout_steps) as made:
        yield made


@pytest.fixture
def rollout(tmp_path_factory: pytest.TempPathFactory, rollout_steps: Steps) -> Iterator[Rollout]:
    """Playbooks, with the checkout's archive on a mirror."""
    archives = tmp_path_factory.mktemp("archives")
    with rollout_steps.step("archive"):
        package.build(archives)
    with mirror(archives) as address:
        yield Rollout(tmp_path_factory.mktemp("r"), archives, address, rollout_steps)
