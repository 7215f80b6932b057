"""nats-server and our certificates: whom it takes a node for, in every pass of a CA's rotation."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import nats
import pytest
from nats.errors import Error as NatsError

from corefleet.identity import Role
from corefleet.pki import CertificateAuthority, batch, inventory
from corefleet.pki.holding import Renewal
from corefleet.pki.rotation import PASSES
from tests.servers.nats import NatsServer

CONFIG = """
tls {{
  cert_file: "{0}/nats.pem", key_file: "{0}/nats.key", ca_file: "{0}/ca.pem", verify_and_map: true
}}
authorization {{ users [ {{ user: "n1.agentd.corefleet" }} ] }}
"""


def bring(ca: CertificateAuthority, directory: Path, role: Role, name: str) -> None:
    """Give a host what it has to have now."""
    want = inventory.want(role, name, ["127.0.0.1"])
    renewal = Renewal(time.time(), 86_400, ca.state.signer)
    batch.issue(ca, batch.lacks([want], lambda _: directory, renewal), directory, 90)


async def talk(server: NatsServer, directory: Path) -> None:
    """Let the node in `directory` have a message of its own back; raises when it is refused."""
    context = ssl.create_default_context(cafile=directory / "ca.pem")
    context.load_cert_chain(directory / "agentd.pem", directory / "agentd.key")
    connection = await nats.connect(
        server.url.replace("nats:", "tls:"), tls=context, connect_timeout=20, allow_reconnect=False
    )
    try:
        heard = await connection.subscribe("here")
        await connection.publish("here", b"hello")
        assert (await heard.next_msg(20)).data == b"hello"
    finally:
        await connection.close()


async def test_a_node_is_known_to_nats_in_every_pass_of_a_rotation(tmp_path: Path) -> None:
    """Node rule 11. In each pass one of the two has the new files first."""
    ca = CertificateAuthority.create(tmp_path / "ca")
    ours, node = tmp_path / "server", tmp_path / "node"
    bring(ca, ours, "nats", "m1")
    bring(ca, node, "agentd", "n1")
    (tmp_path / "nats.conf").write_text(CONFIG.format(ours))
    with NatsServer(tmp_path, ("-c", str(tmp_path / "nats.conf"))) as server:
        await talk(server, node)
        for step in PASSES:
            ca.rotate(step)
            bring(ca, node, "agentd", "n1")
            await talk(server, node)
            bring(ca, ours, "nats", "m1")
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.restart)
            await talk(server, node)


async def test_nats_refuses_other_names_and_other_authorities(tmp_path: Path) -> None:
    ca = CertificateAuthority.create(tmp_path / "ca")
    bring(ca, tmp_path / "server", "nats", "m1")
    bring(ca, tmp_path / "good", "agentd", "n1")
    bring(ca, tmp_path / "n2", "agentd", "n2")
    bring(CertificateAuthority.create(tmp_path / "other"), tmp_path / "n1", "agentd", "n1")
    (tmp_path / "n1/ca.pem").write_bytes(ca.bundle_pem)
    (tmp_path / "nats.conf").write_text(CONFIG.format(tmp_path / "server"))
    with NatsServer(tmp_path, ("-c", str(tmp_path / "nats.conf"))) as server:
        await talk(server, tmp_path / "good")
        for directory in ("n2", "n1"):
            with pytest.raises((NatsError, OSError)):
                await talk(server, tmp_path / directory)
