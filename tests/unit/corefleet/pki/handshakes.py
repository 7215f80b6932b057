"""TLS handshakes between two ends in memory: both verify each other, as all of corefleet does."""

from __future__ import annotations

import ssl
from pathlib import Path

from corefleet.pki import Issued


class Peer:
    """A program: its certificate and whom it trusts, as the files that it would have."""

    def __init__(self, directory: Path, issued: Issued, bundle_pem: bytes) -> None:
        directory.mkdir(exist_ok=True)
        self.cert, self.key, self.ca = (directory / name for name in ("c.pem", "c.key", "ca.pem"))
        self.cert.write_bytes(issued.cert_pem)
        self.key.write_bytes(issued.key_pem)
        self.ca.write_bytes(bundle_pem)

    def context(self, side: int) -> ssl.SSLContext:
        """The strictest context of the standard library that demands a certificate."""
        context = ssl.SSLContext(side)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.cert, self.key)
        return context


def shake_hands(server: Peer, client: Peer, host: str) -> tuple[str, ...]:
    """Let `client` reach `server` as `host`; returns the DNS names that the server sees.

    Raises ssl.SSLError when either end refuses the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    listening = server.context(ssl.PROTOCOL_TLS_SERVER).wrap_bio(
        to_server, to_client, server_side=True
    )
    calling = client.context(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(
        to_client, to_server, server_hostname=host
    )
    waiting = [calling, listening]
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
    seen = listening.getpeercert()
    assert seen is not None
    return tuple(str(name[1]) for name in seen["subjectAltName"] if name[0] == "DNS")
