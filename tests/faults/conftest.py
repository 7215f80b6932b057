"""The plant that the tests of a module share, and the table of what was measured."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests import leaks
from tests.faults import lan
from tests.faults.matrix import MATRIX
from tests.faults.plant import Plant, running_plant


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plant() -> AsyncIterator[Plant]:
    """A running plant under load. When the module is over, its streams are read once more."""
    if why := lan.missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="cff") as data:
        async with running_plant(Path(data)) as running:
            leaks.wider.append(running.pids)
            try:
                yield running
                await running.settle()
            finally:
                leaks.wider.remove(running.pids)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lines := MATRIX.lines():
        terminalreporter.section("the failure matrix, measured")
        for line in lines:
            terminalreporter.write_line(line)
