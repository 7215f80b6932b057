"""The service that operators call: corefleet.v1.Fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator

from controld.api import render
from controld.api.drains import Drains
from controld.api.guard import Access
from controld.api.overview import overview
from controld.api.spec_text import from_text
from controld.api.story import Stories
from controld.calls import OwnerCalls
from controld.cluster import Cluster
from controld.core.fleet import Fleet, NodeStatus
from controld.draining import Draining
from controld.overview import Overview
from controld.registration import Registrar
from controld.registry import Registry
from corefleet.errors import NotFound
from corefleet.ids import check_task_id
from corefleet.messages.wire import ExplainAnswer
from corefleet.rpc import fleet_pb2, fleet_pb2_grpc


class FleetService(fleet_pb2_grpc.FleetServicer):
    """Shows and changes what the cluster is made of."""

    def __init__(
        self,
        cluster: Cluster,
        registry: Registry,
        registrar: Registrar,
        calls: OwnerCalls,
        stories: Stories,
        fleet: Fleet,
        draining: Draining,
        overview: Overview,
    ) -> None:
        self._overview = overview
        self._cluster = cluster
        self._registry = registry
        self._registrar = registrar
        self._calls = calls
        self._stories = stories
        self._fleet = fleet
        self._draining = draining
        self._drains = Drains(cluster, registry, calls, fleet, draining)

    async def ListNodes(  # noqa: N802
        self, request: fleet_pb2.ListNodesRequest, access: Access
    ) -> fleet_pb2.ListNodesReply:
        nodes = sorted(self._fleet.nodes(), key=lambda status: status.registration.node)
        return fleet_pb2.ListNodesReply(nodes=[self._node(status) for status in nodes])

    async def ListPools(  # noqa: N802
        self, request: fleet_pb2.ListPoolsRequest, access: Access
    ) -> fleet_pb2.ListPoolsReply:
        table = self._registry.pools
        return fleet_pb2.ListPoolsReply(
            pools=[
                render.pool(spec, table.revisions[name])
                for name, spec in sorted(table.records.items())
                if access.allows(name)
            ]
        )

    async def ApplyPool(  # noqa: N802
        self, request: fleet_pb2.ApplyPoolRequest, access: Access
    ) -> fleet_pb2.Pool:
        access.check(request.name)
        spec = from_text(request.name, request.spec_toml)
        revision = await self._registrar.apply_pool(spec)
        return render.pool(spec, revision)

    async def Explain(  # noqa: N802
        self, request: fleet_pb2.ExplainRequest, access: Access
    ) -> fleet_pb2.ExplainReply:
        check_task_id(request.task, self._cluster.settings.shards)
        await self._stories.check(access, request.task)
        answer = await self._calls.explain(request.task)
        if not answer.found:
            result = await self._stories.result(request.task)
            if result is None:
                raise NotFound(f"task {request.task}: not known, or its result has expired")
            answer = ExplainAnswer(found=True, chosen=result.node, why=result.why)
        return render.explanation(request.task, answer)

    async def ListControlds(  # noqa: N802
        self, request: fleet_pb2.ListControldsRequest, access: Access
    ) -> fleet_pb2.ListControldsReply:
        controlds = {
            name: fleet_pb2.Controld(controld=name, address=found.address)
            for name, found in sorted(self._registry.controlds.records.items())
        }
        for name, owned in sorted(self._registry.shards.records.items()):
            if owned.controld in controlds:
                controlds[owned.controld].shards.append(int(name))
        for name, owned in sorted(self._registry.racks.records.items()):
            if owned.controld in controlds:
                controlds[owned.controld].racks.append(name)
        return fleet_pb2.ListControldsReply(controlds=list(controlds.values()))

    async def Overview(  # noqa: N802
        self, request: fleet_pb2.OverviewRequest, access: Access
    ) -> fleet_pb2.OverviewReply:
        return await overview(self._cluster.controld, self._registry, self._overview)

    async def DrainNode(  # noqa: N802
        self, request: fleet_pb2.DrainNodeRequest, access: Access
    ) -> fleet_pb2.Drain:
        return await self._drains.begin(request, access.by)

    async def UndrainNode(  # noqa: N802
        self, request: fleet_pb2.UndrainNodeRequest, access: Access
    ) -> fleet_pb2.UndrainNodeReply:
        return await self._drains.end(request)

    async def WatchDrain(  # noqa: N802
        self, request: fleet_pb2.WatchDrainRequest, access: Access
    ) -> AsyncIterator[fleet_pb2.DrainProgress]:
        async for progress in self._drains.watch(request):
            yield progress

    def _node(self, status: NodeStatus) -> fleet_pb2.Node:
        made = render.node(status)
        drain = self._draining.of(made.node)
        if drain is not None:
            waits = made.node in self._draining.plan.waiting
            made.drain.CopyFrom(render.drain(drain, waits=waits))
        return made
