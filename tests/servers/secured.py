"""Servers that take only whom a CA and a list of identities let in, as in production.

authority = CertificateAuthority.create(tmp_path / "ca")
tls = write_tls(authority, tmp_path / "a", Identity("agentd", "a"))   # a TlsConfig
with SecuredNats(tmp_path, authority, [Member(Identity("agentd", "a"), "r1")]) as nats:
    NatsConfig(servers=(nats.url,), tls=tls)
    nats.let_in([...])                                                # reload
with SecuredEtcd(tmp_path, authority) as etcd: ...
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

from corefleet.config import TlsConfig
from corefleet.identity import Identity
from corefleet.nats_config import Member, NatsServerPlan, render
from corefleet.pki import CertificateAuthority
from tests.servers.etcd import EtcdServer
from tests.servers.nats import NatsServer

LOOPBACK = ("127.0.0.1", "localhost")
_RELOAD_S = 60.0
_RELOADED = "Reloaded server configuration"


def write_tls(
    authority: CertificateAuthority,
    directory: Path,
    identity: Identity,
    hosts: tuple[str, ...] = (),
) -> TlsConfig:
    """Issue a certificate for `identity`; return its files, in `directory`."""
    issued = authority.issue(identity, hosts)
    directory.mkdir(parents=True, exist_ok=True)
    ca, cert, key = (directory / name for name in ("ca.pem", "cert.pem", "key.pem"))
    ca.write_bytes(authority.bundle_pem)
    cert.write_bytes(issued.cert_pem)
    key.write_bytes(issued.key_pem)
    return TlsConfig(ca=str(ca), cert=str(cert), key=str(key))


class SecuredNats(NatsServer):
    """A nats-server on its own, configured as `agentctl nats-config` does it."""

    def __init__(
        self, directory: Path, authority: CertificateAuthority, members: Iterable[Member]
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._config = directory / "nats.conf"
        tls = write_tls(authority, directory / "tls", Identity("nats", "nats-1"), LOOPBACK)
        self._plan = NatsServerPlan(
            name="nats-1",
            listen="127.0.0.1:4222",
            store_dir=str(directory / "data"),
            ca=tls.ca,
            cert=tls.cert,
            key=tls.key,
        )
        self._config.write_text(render(self._plan, members))
        super().__init__(directory, ("--config", str(self._config)))

    def let_in(self, members: Iterable[Member]) -> None:
        """Have the running server take these members, and return when it does."""
        self._config.write_text(render(self._plan, members))
        done = threading.Event()
        self.watch(_RELOADED, done.set)
        os.kill(self.pid, signal.SIGHUP)
        if not done.wait(_RELOAD_S):
            raise RuntimeError(f"nats-server did not reload:\n{self.output()}")

    def _stored(self) -> tuple[str, ...]:
        """The file of configuration says it."""
        return ()


class SecuredEtcd(EtcdServer):
    """An etcd that asks for certificates of `authority`; who may do what is set by the test."""

    def __init__(self, directory: Path, authority: CertificateAuthority) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        tls = write_tls(authority, directory / "tls", Identity("etcd", "etcd-1"), LOOPBACK)
        super().__init__(directory, tls=tls)
