"""Fixtures of tests that need a control plane on real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from corefleet.client import Client
from tests.integration.control_plane import POOL, ControlPlane, all_owned, node_state
from tests.servers.etcd import EtcdServer
from tests.servers.nats import NatsServer


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd, NATS and two controlds with 16 shards over two streams."""
    directory = tmp_path_factory.mktemp("plane")
    for name in ("etcd", "nats"):
        (directory / name).mkdir()
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(directory / "etcd"))
        nats = stack.enter_context(NatsServer(directory / "nats"))
        made = ControlPlane(directory, etcd, nats, {})
        for name in ("c1", "c2"):
            made.controlds[name] = stack.enter_context(made.controld(name))
        yield made


@pytest.fixture
async def client(plane: ControlPlane) -> AsyncIterator[Client]:
    """A client of both, once both own a share of the shards and no node is left alive."""
    async with Client(plane.addresses) as made:
        await all_owned(made)
        for node in await made.nodes():
            await node_state(made, node.node, "lost")
        await made.apply_pool("p", POOL)
        yield made
