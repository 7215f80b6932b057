"""Servers that ask their clients for certificates, for contracts that hold with TLS as without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from corefleet.config import TlsConfig
from corefleet.identity import Identity
from tests.servers.authority import Authority
from tests.servers.etcd import EtcdServer
from tests.servers.nats import NatsServer


@dataclass(frozen=True, slots=True)
class Secured:
    """Where a server is, and what a client of it shows."""

    address: str
    tls: TlsConfig


@pytest.fixture(scope="module")
def secure_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A server that no test harms."""
    directory, authority = tmp_path_factory.mktemp("secure"), Authority()
    ours = authority.write(directory / "ours", Identity("controld", "c1"))
    tls = authority.write(directory / "pki", Identity("nats", "s1"))
    with NatsServer(directory, tls=tls) as running:
        yield Secured(running.url, ours)


@pytest.fixture(scope="module")
def secure_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """An etcd that no test harms."""
    directory, authority = tmp_path_factory.mktemp("secure"), Authority()
    ours = authority.write(directory / "ours", Identity("controld", "c1"))
    tls = authority.write(directory / "pki", Identity("etcd", "e1"))
    with EtcdServer(directory, tls=tls) as running:
        yield Secured(running.endpoint, ours)
