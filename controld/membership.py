"""This controld's registration in the store, on a lease that is renewed for ever."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import structlog

from controld.cluster import Cluster
from corefleet.background import Background, stop
from corefleet.codec import decode, encode
from corefleet.errors import Conflict, Unavailable
from corefleet.messages.records import ControldRegistration
from corefleet.store import Compare, Delete, Lease, Put
from corefleet.subjects import controld_key

_log = structlog.get_logger(__name__)

_RETRY_S = 0.3
_JOIN_S = 10.0
_STEADY_S = 30.0
_MOST_PAUSE_S = 15.0
"""Who loses lease after lease comes back ever later: each return moves units of all others."""


def rejoin_pause_s(losses: int, chance: float) -> float:
    """Return how long to stay away after `losses` short memberships in a row.

    None after a long one; then twice as long each time, by `chance` in [0, 1) down to half.
    """
    if not losses:
        return 0.0
    return float(min(_MOST_PAUSE_S, _RETRY_S * 2**losses) * (1 - chance / 2))


class Membership:
    """Joins the cluster, and joins it anew whenever the lease was lost."""

    def __init__(
        self,
        cluster: Cluster,
        background: Background,
        registration: ControldRegistration,
        ttl_s: float,
    ) -> None:
        self._cluster = cluster
        self._background = background
        self._registration = registration
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._task: asyncio.Task[None] | None = None
        self._removed = asyncio.Event()
        self.revision = 0
        """Revision of our registration: a claim holds only while it stands."""

    def valid_until(self) -> float:
        """Monotonic seconds until which we may act; 0 while we are no member."""
        return self._lease.valid_until() if self._lease else 0.0

    async def join(self, lost: Callable[[], None]) -> None:
        """Register; from then on call `lost` whenever the lease ended, and register anew.

        Raises Conflict when another process with this id keeps its registration, and
        Unavailable when the store did not take ours within 10 s.
        """
        give_up = self._cluster.clock.monotonic() + _JOIN_S
        while self._lease is None:
            try:
                await self._register()
            except Unavailable as error:
                if self._cluster.clock.monotonic() > give_up:
                    raise
                _log.warning("not registered yet", error=str(error))
                await asyncio.sleep(_RETRY_S)
        self._task = self._background.spawn(self._keep(lost), "membership")

    def removed(self, revision: int) -> None:
        """Our registration went at `revision`: others took us for dead."""
        if self._lease is not None and revision > self.revision:
            self._removed.set()

    async def leave(self) -> None:
        """End the registration at once. Idempotent."""
        await stop(self._task)
        self._task = None
        if self._lease is not None:
            lease, self._lease = self._lease, None
            try:
                await lease.revoke()
            except Unavailable as error:
                _log.warning("lease not revoked; it will expire", error=str(error))

    async def _keep(self, lost: Callable[[], None]) -> None:
        clock, losses = self._cluster.clock, 0
        while True:
            if self._lease is not None:
                began = clock.monotonic()
                await self._over(self._lease)
                losses = losses + 1 if clock.monotonic() - began < _STEADY_S else 0
                _log.warning("membership lost: no decisions until registered anew")
                old, self._lease = self._lease, None
                self._removed.clear()
                lost()
                with contextlib.suppress(Unavailable):
                    await old.revoke()
                await asyncio.sleep(rejoin_pause_s(losses, random.random()))
            try:
                await self._register()
                _log.info("registered anew", controld=self._registration.controld)
            except (Unavailable, Conflict) as error:
                _log.warning("not registered yet", error=str(error))
                await asyncio.sleep(_RETRY_S)

    async def _over(self, lease: Lease) -> None:
        """Return when the lease is lost or the registration was removed."""
        waiting = [asyncio.ensure_future(each) for each in (lease.lost(), self._removed.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                await stop(each)

    async def _register(self) -> None:
        """Take a lease and write the registration; waits for an older one to expire."""
        store = self._cluster.store
        key = controld_key(self._registration.controld)
        lease = await store.lease(self._ttl_s)
        try:
            give_up = self._cluster.clock.monotonic() + 2 * self._ttl_s + 1
            while True:
                put = Put(key, encode(self._registration), lease.id)
                done = await store.commit([Compare(key, 0)], [put])
                if done.succeeded:
                    self.revision = done.revision
                    self._lease = lease
                    return
                await self._wait_for_older(key, give_up)
        except BaseException:  # whatever ends this, cancellation too, must leave no lease behind
            with contextlib.suppress(Unavailable):
                await lease.revoke()
            raise

    async def _wait_for_older(self, key: str, give_up: float) -> None:
        found = await self._cluster.store.get(key)
        if found is not None and self._former_self(decode(found.value, ControldRegistration)):
            await self._cluster.store.commit([Compare(key, found.mod_revision)], [Delete(key)])
            return
        if found is not None and self._cluster.clock.monotonic() > give_up:
            address = decode(found.value, ControldRegistration).address
            raise Conflict(
                f"id: {self._registration.controld!r} is in use by the controld at {address}; "
                "expected an id of its own for each"
            )
        await asyncio.sleep(_RETRY_S)

    def _former_self(self, older: ControldRegistration) -> bool:
        """Whether it is of a process before us: we hold the address that it listened on.

        Never of one that began later: of two that share id and address by mistake, on two
        hosts, the later one stays.
        """
        own = self._registration
        return older.address == own.address and older.started_ms < own.started_ms
