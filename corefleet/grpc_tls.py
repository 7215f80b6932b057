"""Certificates for gRPC: what servers and channels are made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from corefleet.tls import Material, TlsFiles


def open_channel(
    address: str, material: Material | None, options: Sequence[tuple[str, Any]]
) -> Any:
    """Return a channel to `address`, host:port: in plain text without `material`.

    A channel keeps what it was made with; new certificates need a new one.
    """
    if material is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
    return grpc.aio.secure_channel(address, credentials, options=options)


def server_credentials(files: TlsFiles) -> Any:
    """Return credentials of a server that asks every client for a certificate.

    Each new connection gets what the files hold then; those that stand are left alone.
    """
    given = files.current()

    def newer() -> Any:
        # gRPC calls this on a thread of its own, before each handshake.
        nonlocal given
        found = files.current()
        if found is given:
            return None
        given = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given), newer, require_client_authentication=True
    )


def _configuration(material: Material) -> Any:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)
