"""The gRPC server: our services, health and reflection, behind the guard."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from controld.api.access import AccessService
from controld.api.fleet import FleetService
from controld.api.guard import Guard
from controld.api.tasks import TasksService
from corefleet.errors import Unavailable
from corefleet.grpc_tls import server_credentials
from corefleet.rpc import (
    access_pb2,
    access_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
)
from corefleet.tls import TlsFiles

_MAX_MESSAGE_BYTES = 8 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class PortInUse(Unavailable):
    """The address to listen on cannot be bound."""


class ApiServer:
    """Serves clients and operators on one address; with `tls`, only who has a certificate."""

    def __init__(
        self,
        listen: str,
        guard: Guard,
        tasks: TasksService,
        fleet: FleetService,
        tls: TlsFiles | None = None,
    ) -> None:
        self._listen = listen
        self._tls = tls
        self._health = health_aio.HealthServicer()
        self._server = grpc.aio.server(interceptors=(guard,), options=_OPTIONS)
        tasks_pb2_grpc.add_TasksServicer_to_server(tasks, self._server)  # type: ignore[no-untyped-call]
        fleet_pb2_grpc.add_FleetServicer_to_server(fleet, self._server)  # type: ignore[no-untyped-call]
        access_pb2_grpc.add_AccessServicer_to_server(AccessService(), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services = (
            tasks_pb2.DESCRIPTOR.services_by_name["Tasks"].full_name,
            fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name,
            access_pb2.DESCRIPTOR.services_by_name["Access"].full_name,
        )
        reflection.enable_server_reflection(
            (
                *self._services,
                reflection.SERVICE_NAME,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            ),
            self._server,
        )

    def bind(self) -> str:
        """Take the address; return it as host:port with the port that was taken.

        Raises PortInUse.
        """
        host = self._listen.rpartition(":")[0]
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(self._listen)
            else:
                port = self._server.add_secure_port(self._listen, server_credentials(self._tls))
        except RuntimeError as error:
            raise PortInUse(f"listen: {self._listen}: cannot be bound: {error}") from error
        if port == 0:
            raise PortInUse(f"listen: {self._listen}: cannot be bound; is the port in use?")
        return f"{host}:{port}"

    async def start(self) -> None:
        """Begin to serve."""
        await self._server.start()
        for name in ("", *self._services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def close(self, grace_s: float) -> None:
        """Refuse new calls, let those under way end within `grace_s`. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
