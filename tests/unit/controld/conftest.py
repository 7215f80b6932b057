"""What tests of whole controlds in this process stand on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.controld.plane import POOL, Plane, plane_of


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    """One server and one store, with the pool `p`."""
    async with plane_of(POOL) as made:
        yield made
