"""The parts of a controld and how they are wired; what they stand on is given to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

from controld.api.callers import Authenticator
from controld.api.fleet import FleetService
from controld.api.followers import Followers
from controld.api.guard import Guard
from controld.api.server import ApiServer, PortInUse
from controld.api.story import Stories
from controld.api.tasks import TasksService
from controld.calls import OwnerCalls
from controld.cluster import Cluster
from controld.core.admission import Admission, AdmissionSettings
from controld.core.fleet import Fleet
from controld.core.liveness import LivenessTimes
from controld.core.loss_gate import LossGate
from controld.core.mass_loss import MassLoss, MassLossLimits
from controld.core.overload import Overload, OverloadLimits
from controld.core.ownership import OwnershipCore
from controld.core.quota_shares import QuotaShares
from controld.draining import Draining
from controld.exporter import Exporter
from controld.gauges import make_gauges
from controld.intake import Intake
from controld.losses import Losses
from controld.membership import Membership
from controld.moves import Moves
from controld.observer import Observer
from controld.overview import Overview
from controld.owner import Owner
from controld.peer_reach import GrpcReach
from controld.peers import PeerReach, Peers
from controld.quotas import Quotas
from controld.registration import Registrar
from controld.registry import Registry
from controld.settings import grant_of
from controld.shards import Shards
from controld.units import OwnedUnits
from corefleet import metrics
from corefleet.background import Background
from corefleet.bus import Bus
from corefleet.config import ControldConfig, LivenessConfig
from corefleet.errors import Unavailable
from corefleet.messages.records import ControldRegistration
from corefleet.program import version
from corefleet.tls import TlsFiles

_DRAIN_S = 2.0


class Parts:
    """The parts of a controld, wired to each other; knows no concrete adapter."""

    def __init__(
        self,
        config: ControldConfig,
        cluster: Cluster,
        background: Background,
        registry: Registry,
        beats_bus: Bus,
        tls: TlsFiles | None = None,
    ) -> None:
        self._config = config
        self._tls = tls
        self._cluster = cluster
        self._background = background
        self._registry = registry
        self._beats_bus = beats_bus
        self._metrics = metrics.Metrics(version())
        self._gauges = make_gauges(self._metrics)
        self._fleet = Fleet(config.sample_size)
        guard = MassLoss(_limits(config.liveness))
        self.observer = Observer(
            cluster, background, self._gauges, beats_bus, config.liveness.probe_timeout_s
        )
        self.losses = Losses(
            cluster, background, registry, self._gauges, beats_bus, guard, self.observer
        )
        self._shards = Shards(
            cluster, background, registry, self._gauges, self._fleet, LossGate(self._fleet, guard)
        )
        self._draining = Draining(registry, self._shards, config.drains.max_share)
        self._calls = OwnerCalls(cluster)
        self._stories = Stories(cluster, self._calls)
        self._followers = Followers(cluster, background, self._stories)
        self._registrar = Registrar(cluster, registry, background)
        admission = _admission(config, cluster)
        self._quotas = Quotas(
            cluster, background, registry, beats_bus, self._gauges, admission, self._shards
        )
        self._intake = Intake(
            cluster,
            background,
            registry,
            self._gauges,
            admission,
            self._shards.backlog,
        )
        self.guard = Guard(
            cluster.clock,
            Authenticator(cluster.clock, background, config.auth.tokens),
            [grant_of(each) for each in config.auth.grants],
        )
        self._overview = Overview(
            cluster,
            background,
            registry,
            self._gauges,
            self._fleet,
            self._own,
            bool(config.metrics),
        )
        self._exporter = Exporter(cluster, background, registry, beats_bus, self._gauges)

    async def start(self, stack: AsyncExitStack) -> str:
        """Start all; `stack` stops them in the reverse order. Return the served address."""
        server = self._server()
        address = server.bind()
        if self._config.metrics:
            try:
                scraped = metrics.serve(self._metrics, self._config.metrics, self._tls)
            except Unavailable as error:
                raise PortInUse(str(error)) from error
            stack.push_async_callback(asyncio.to_thread, scraped.close)
        parts = (
            self.guard,
            *(self.observer, self.losses, self._shards, self._draining),
            *(self._followers, self._registrar, self._quotas, self._intake, self._overview),
        )
        for part in parts:
            stack.push_async_callback(part.close)
            await part.start()
        owner = self._owner(address)
        self._shards.may_act = owner.may_act
        self._shards.superseded = owner.superseded
        stack.push_async_callback(_together, owner.close, lambda: server.close(_DRAIN_S))
        # Who is registered answers: a port of a member that refuses is a dead member's.
        await server.start()
        await owner.start()
        if self._config.metrics:
            stack.push_async_callback(self._exporter.close)
            self._exporter.start(owner.may_act, self._own)
        peers = Peers(self._cluster, self._background, self._registry, self._gauges, self._reach())
        stack.push_async_callback(peers.close)
        await peers.start()
        return address

    def _own(self) -> tuple[int, Mapping[str, int], Mapping[str, int]]:
        shards = self._shards
        return shards.live(), shards.backlog(), shards.in_flight()

    def _reach(self) -> PeerReach:
        return GrpcReach(self._tls)

    def _server(self) -> ApiServer:
        tasks = TasksService(
            self._cluster, self._intake, self._stories, self._followers, self._calls
        )
        fleet = FleetService(
            self._cluster,
            self._registry,
            self._registrar,
            self._calls,
            self._stories,
            self._fleet,
            self._draining,
            self._overview,
        )
        return ApiServer(self._config.listen, self.guard, tasks, fleet, self._tls)

    def _owner(self, address: str) -> Owner:
        registration = ControldRegistration(
            controld=self._config.id,
            address=self._config.advertise or address,
            started_ms=self._cluster.clock.wall_ms(),
            version=version(),
        )
        membership = Membership(
            self._cluster, self._background, registration, self._config.lease_ttl_s
        )
        units = OwnedUnits(
            self._cluster,
            self._background,
            self._registry,
            self._gauges,
            self._beats_bus,
            self.observer,
            self.losses,
            self._shards,
            _times(self._config.liveness),
        )
        core = OwnershipCore(self._config.id, self._cluster.chance)
        return Owner(
            self._cluster,
            self._background,
            self._registry,
            core,
            membership,
            units,
            Moves(self._gauges).count,
        )


async def _together(*closing: Callable[[], Awaitable[None]]) -> None:
    await asyncio.gather(*(close() for close in closing))


def _admission(config: ControldConfig, cluster: Cluster) -> Admission:
    limits = OverloadLimits(config.overload.cpu_limit, config.overload.loop_lag_limit_s)
    clock = cluster.clock
    return Admission(
        AdmissionSettings(max_input_bytes=cluster.settings.max_input_bytes),
        QuotaShares(config.id, clock.monotonic(), clock.wall_ms()),
        Overload(limits),
    )


def _times(config: LivenessConfig) -> LivenessTimes:
    return LivenessTimes(
        suspect_after_s=config.suspect_after_s,
        lost_after_s=config.lost_after_s,
        probe_timeout_s=config.probe_timeout_s,
        cut_after_s=config.cut_after_s,
        digest_interval_s=config.digest_interval_s,
        loop_grace_s=config.agentd_grace_s,
    )


def _limits(config: LivenessConfig) -> MassLossLimits:
    return MassLossLimits(
        max_lost_share=config.max_lost_share,
        max_lost_floor=config.max_lost_floor,
        mass_window_s=config.mass_window_s,
    )
