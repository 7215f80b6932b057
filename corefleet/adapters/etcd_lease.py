"""A lease in etcd that is kept alive until it is revoked or lost.

Every keep-alive is a call of its own with a short deadline, repeated on other members
until the lease is past its end for the holder (docs/architecture.md, rule 7).
"""

from __future__ import annotations

import asyncio

import structlog
from etcd.api.etcdserverpb import rpc_pb2

from corefleet.adapters.etcd_endpoints import WITH_LEADER, Endpoint, Endpoints, backoff
from corefleet.clock import Clock
from corefleet.errors import CorefleetError, NotFound, Unavailable

MARGIN = 0.1
"""Part of the TTL by which the holder gives up earlier than the server."""
KEEP_ALIVES_PER_TTL = 3

log = structlog.get_logger(__name__)


class EtcdLease:
    """A granted lease. `sent` is when the grant was sent, in the clock's monotonic seconds."""

    def __init__(
        self, endpoints: Endpoints, clock: Clock, lease_id: int, ttl_s: float, sent: float
    ) -> None:
        self._endpoints = endpoints
        self._clock = clock
        self._id = lease_id
        self._ttl_s = ttl_s
        self._sent = sent
        self._valid_until = sent + ttl_s * (1 - MARGIN)
        self._ended = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep(), name=f"etcd lease {lease_id:x}")

    @property
    def id(self) -> int:
        return self._id

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def valid_until(self) -> float:
        return self._valid_until

    async def lost(self) -> None:
        await self._ended.wait()

    async def revoke(self) -> None:
        self._valid_until = min(self._valid_until, self._clock.monotonic())
        await self.stop()
        request = rpc_pb2.LeaseRevokeRequest(ID=self._id)

        async def send(member: Endpoint, timeout: float) -> None:
            await member.lease.LeaseRevoke(request, timeout=timeout, metadata=WITH_LEADER)

        try:
            await self._endpoints.call("lease revoke", send, repeat=True)
        except NotFound:
            return

    async def stop(self) -> None:
        """End the keep-alives without revoking: the server ends the lease after its TTL."""
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        self._ended.set()

    async def _keep(self) -> None:
        reason = ""
        try:
            while not reason:
                due = self._sent + self._ttl_s / KEEP_ALIVES_PER_TTL
                await asyncio.sleep(max(0.0, due - self._clock.monotonic()))
                reason = await self._refresh()
            log.warning("lease lost", lease=f"{self._id:x}", reason=reason)
        finally:
            self._ended.set()

    async def _refresh(self) -> str:
        """Send one keep-alive; return why the lease has ended, '' if it goes on."""
        left = self._valid_until - self._clock.monotonic()
        if left <= 0:
            return "past its end: this process did not run in time"
        try:
            sent, ttl_s = await self._endpoints.call(
                "lease keep-alive",
                self._send,
                repeat=True,
                timeout_s=left,
                attempt_s=self._ttl_s / KEEP_ALIVES_PER_TTL / 2,
            )
        except Unavailable as error:
            return f"no keep-alive was answered in time: {error}"
        except CorefleetError as error:
            return f"keep-alive refused: {error}"
        if ttl_s is None:
            await asyncio.sleep(backoff(1, left))
            return ""
        if ttl_s <= 0:
            self._valid_until = min(self._valid_until, self._clock.monotonic())
            return "expired or revoked elsewhere"
        self._sent = sent
        self._valid_until = sent + ttl_s * (1 - MARGIN)
        return ""

    async def _send(self, member: Endpoint, timeout: float) -> tuple[float, float | None]:
        """Return send time and TTL: 0 if there is no such lease, None without an answer."""
        request = rpc_pb2.LeaseKeepAliveRequest(ID=self._id)
        sent = self._clock.monotonic()
        call = member.lease.LeaseKeepAlive(iter([request]), timeout=timeout, metadata=WITH_LEADER)
        ttl_s = None
        async for answer in call:
            ttl_s = float(answer.TTL)
        return sent, ttl_s


async def grant(endpoints: Endpoints, clock: Clock, ttl_s: int) -> EtcdLease:
    """Grant a lease of `ttl_s` seconds (more if the server's minimum is) and keep it alive.

    A grant whose answer was lost is repeated: the first one expires unused.
    """
    request = rpc_pb2.LeaseGrantRequest(TTL=ttl_s)

    async def send(member: Endpoint, timeout: float) -> tuple[float, int, float]:
        sent = clock.monotonic()
        answer = await member.lease.LeaseGrant(request, timeout=timeout, metadata=WITH_LEADER)
        return sent, answer.ID, float(answer.TTL)

    sent, lease_id, granted_s = await endpoints.call("lease grant", send, repeat=True)
    return EtcdLease(endpoints, clock, lease_id, granted_s, sent)
