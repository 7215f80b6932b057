"""A peer's gRPC port: a health stream held open, and a plain connection tried."""

from __future__ import annotations

import asyncio

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corefleet.grpc_tls import open_channel
from corefleet.tls import TlsFiles
from corefleet.tls_trouble import ask

_log = structlog.get_logger(__name__)

_CONNECT_S = 0.5


class GrpcReach:
    """Implements controld.peers.PeerReach."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._tls = tls

    async def until_gone(self, address: str) -> None:
        material = None if self._tls is None else self._tls.current()
        async with open_channel(address, material, ()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                # Each answer is a state of its services; only the end matters here.
                async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                    pass
            except grpc.aio.AioRpcError as error:
                if self._tls is not None and "handshake" in str(error.details()).lower():
                    reason = await ask(address, self._tls)
                    _log.warning("peer not reached", address=address, reason=reason)

    async def refused(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return False
